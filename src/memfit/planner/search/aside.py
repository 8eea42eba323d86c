"""Carries work out in a process beside this one, from the state that this one is in."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

import psutil
import torch
import torch.distributed

Found = TypeVar("Found")

_MOST_PROCESSES = 4
"""More have little to do: few plans are sure to be wanted at a time."""
_USUAL_SECONDS = 300.0
_LOOK_SECONDS = 2.0
_LEAST_SHARE = 0.2
"""Of a core: a copy that is waited for and gets less is not waited for any longer."""
_DIE_WITH_PARENT = 1
"""``PR_SET_PDEATHSIG`` in linux/prctl.h."""


def usable_processes() -> int:
    """Return how many processes plans may be recorded in by default: one for each free core."""
    if not can_fork():
        return 1
    return max(1, min(_MOST_PROCESSES, len(os.sched_getaffinity(0))))


def can_fork() -> bool:
    """Return whether a copy of this process can record.

    Forking breaks CUDA's and macOS's libraries, and autograd refuses it where it has threads for
    devices (``Engine::start_device_threads`` in torch/csrc/autograd/engine.cpp, torch 2.13).
    """
    return (
        sys.platform == "linux"
        and not multiprocessing.current_process().daemon
        and not torch.cuda.is_available()
        and not (torch.distributed.is_available() and torch.distributed.is_initialized())
    )


class AsideSeries(Generic[Found]):
    """Work in a copy of this process whose results are taken one by one, as they come.

    It changes nothing here.

    Args:
        work: is iterated over in the copy; what it yields is pickled.
        niceness: added to the copy's, so that it takes only what others leave of the processor.
        most_seconds: what is waited for no longer is done here: a lock that another thread held
            while the copy was made is never given back in it.
    """

    def __init__(
        self,
        work: Callable[[], Iterable[Found]],
        niceness: int = 0,
        most_seconds: float = _USUAL_SECONDS,
    ) -> None:
        self._most_seconds = most_seconds
        self._owner = os.getpid()
        here, there = multiprocessing.Pipe(duplex=False)
        self._connection: Connection = here
        context = multiprocessing.get_context("fork")
        words = work, there, here, niceness, self._owner
        self._process = context.Process(target=_carry_out, args=words, daemon=True)
        with warnings.catch_warnings():
            # The threads that draw progress are not there in the copy, which draws nothing.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        there.close()

    @property
    def is_running(self) -> bool:
        """Return whether there is nothing to be had yet."""
        return self._process.is_alive() and not self._connection.poll()

    def next(self) -> Found | None:
        """Wait for the next result; None if none came or is to come, so that it is done here.

        The copy is ended then. Another copy of the process that started this one is told nothing,
        as what it took would be missed there.
        """
        if self._connection.closed or os.getpid() != self._owner:
            return None
        try:
            if self._comes():
                found: Found = pickle.loads(self._connection.recv_bytes())
                return found
        except (EOFError, OSError, pickle.PickleError, AttributeError, TypeError, ImportError):
            pass
        self.stop()
        return None

    def _comes(self) -> bool:
        """Wait until there is something to read; False once waiting is not worth it.

        Where others take the processor, a copy that gets only what they leave would get nothing,
        and this process would wait for it instead of doing the work.
        """
        end = time.monotonic() + self._most_seconds
        while (left_seconds := end - time.monotonic()) > 0:
            began, before = time.monotonic(), _busy_seconds(self._process.pid)
            if self._connection.poll(min(left_seconds, _LOOK_SECONDS)):
                return True
            waited_seconds = time.monotonic() - began
            if _busy_seconds(self._process.pid) - before < _LEAST_SHARE * waited_seconds:
                return False
        return False

    def stop(self) -> None:
        """End the process, if it has not ended; another copy leaves it to who started it."""
        if self._connection.closed:
            return
        self._connection.close()
        if os.getpid() != self._owner:
            return
        self._process.kill()
        self._process.join()


class Aside(AsideSeries[Found]):
    """Work with one result that is done in a copy of this process, which changes nothing here.

    Args:
        work: is called in the copy; what it returns is pickled.
        niceness: as for ``AsideSeries``.
        most_seconds: as for ``AsideSeries``.
    """

    def __init__(
        self,
        work: Callable[[], Found],
        niceness: int = 0,
        most_seconds: float = _USUAL_SECONDS,
    ) -> None:
        super().__init__(lambda: (work(),), niceness, most_seconds)

    def result(self) -> Found | None:
        """Wait for what the work returned; None if it failed in any way, so that it is done here.

        Can be asked once.
        """
        try:
            return self.next()
        finally:
            self.stop()


def _busy_seconds(pid: int | None) -> float:
    """Return the processor time that a process has had; without end where it is over."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return float("inf")  # what it has sent is read, or its end seen
    return float(times.user + times.system)


def _carry_out(
    work: Callable[[], Iterable[Found]],
    connection: Connection,
    others: Connection,
    niceness: int,
    parent: int,
) -> None:
    """Do the work in the copy, and send what it gives; where it fails, nothing more."""
    others.close()  # else nobody would notice that the reader is gone
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before it was followed
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it decides what becomes of it
    os.nice(niceness)
    # What the job's code prints appears once, where the job was recorded first.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)
    torch.set_num_threads(1)  # the threads of a pool are not copied
    gc.freeze()  # what was there stays; looking through it would copy its memory
    try:
        for found in work():
            connection.send_bytes(pickle.dumps(found))
    except BaseException:  # noqa: BLE001 - it is done again where it can be reported
        return
