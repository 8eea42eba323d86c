"""Starts a command, hands signals on to it, samples its memory and waits for its end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from memfit.errors import CommandNotStartedError, MemfitError
from memfit.observe.processes import started_at, tree_memory

from .host_killer import KillerSigns, LastSample

_SAMPLE_SECONDS, _FIRST_SECONDS = 0.25, 0.01
_HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_WAITED_FOR = (*_HANDED_ON, signal.SIGCHLD)
_FROM_KERNEL = 0x80
"""In ``si_code`` of a signal that the terminal sent: SI_KERNEL, asm-generic/siginfo.h of Linux."""
_SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG, include/uapi/linux/prctl.h."""
_GRACE_SECONDS = 5.0
_SAVING_SECONDS = 30.0
"""For a process that was asked to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEnd:
    """How a command ended, as seen from outside."""

    exit_code: int
    """As a shell gives it: 128 and the number of the signal if one killed it."""
    signal_number: int | None
    """The signal that killed it."""
    received: tuple[int, ...]
    """Signals that came for the command while it ran."""
    host_peak_bytes: int
    """The most that was resident in all processes together."""
    last_sample: LastSample


def supervise(
    words: Sequence[str], environment: Mapping[str, str], signs: KillerSigns
) -> CommandEnd:
    """Run a command to its end.

    It has this process's standard streams. In the foreground of a terminal it has this process's
    group as well, so that the terminal's signals reach it by themselves; elsewhere it has a group
    of its own, and each signal for this process is handed on to that group, once.

    Raises:
        CommandNotStartedError: if there is no such program, or it cannot be executed.
    """
    if not hasattr(signal, "sigtimedwait"):
        msg = "`memfit run` needs Linux: it follows processes through /proc."
        raise MemfitError(msg)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    try:
        has_own_group = not _is_in_foreground()
        child = _start(words, environment, before, has_own_group=has_own_group)
        return _Supervision(child, signs, has_own_group=has_own_group).wait()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_left_behind(processes: Mapping[int, int]) -> tuple[int, ...]:
    """End processes that have outlived the command: they get time to do so by themselves.

    Args:
        processes: the time at which each was started, by its id.

    Returns:
        the ids of those that had to be ended.
    """
    ended: list[int] = []
    for number, seconds in ((signal.SIGTERM, _GRACE_SECONDS), (signal.SIGKILL, _SAVING_SECONDS)):
        if _are_gone_within(processes, seconds):
            break
        for process_id in _living(processes):
            ended.append(process_id)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, number)
    _are_gone_within(processes, _GRACE_SECONDS)
    return tuple(dict.fromkeys(ended))


class _Supervision:
    """What is known of a command that runs."""

    def __init__(
        self, child: subprocess.Popen[bytes], signs: KillerSigns, *, has_own_group: bool
    ) -> None:
        self._child = child
        self._has_own_group = has_own_group
        self._signs = signs
        self._received: list[int] = []
        self._process_ids: set[int] = set()
        self._host_peak_bytes = 0
        self._resident_bytes = 0
        self._available_bytes: int | None = None

    def wait(self) -> CommandEnd:
        began_seconds = next_seconds = time.monotonic()
        while self._child.poll() is None:
            if time.monotonic() >= next_seconds:
                self._sample()
                # Often at first: a command that ends soon has its peak soon.
                lived_seconds = time.monotonic() - began_seconds
                wait_seconds = min(_SAMPLE_SECONDS, _FIRST_SECONDS + lived_seconds / 4)
                next_seconds = time.monotonic() + wait_seconds
            found = signal.sigtimedwait(_WAITED_FOR, max(0.0, next_seconds - time.monotonic()))
            if found is not None and found.si_signo != signal.SIGCHLD:
                self._hand_on(found)
        code = self._child.returncode
        return CommandEnd(
            exit_code=128 - code if code < 0 else code,
            signal_number=-code if code < 0 else None,
            received=tuple(self._received),
            host_peak_bytes=self._host_peak_bytes,
            last_sample=LastSample(
                process_ids=frozenset(self._process_ids),
                resident_bytes=self._resident_bytes,
                available_bytes=self._available_bytes,
            ),
        )

    def _hand_on(self, found: signal.struct_siginfo) -> None:
        # A wait that a stop and a continuation cut short gives no signal at all.
        if found.si_signo not in _HANDED_ON:
            return
        self._received.append(found.si_signo)
        if not self._has_own_group and found.si_code == _FROM_KERNEL:
            return  # the terminal has sent it to the command as well
        with contextlib.suppress(ProcessLookupError):
            if self._has_own_group:
                os.killpg(self._child.pid, found.si_signo)
            else:
                self._child.send_signal(found.si_signo)

    def _sample(self) -> None:
        memory = tree_memory(self._child.pid)
        self._process_ids.update(memory.process_ids)
        if memory.resident_bytes:  # a process that has just ended has none
            self._resident_bytes = memory.resident_bytes
            self._available_bytes = self._signs.available_bytes()
        self._host_peak_bytes = max(self._host_peak_bytes, memory.resident_bytes)


def _start(
    words: Sequence[str],
    environment: Mapping[str, str],
    mask: set[int | signal.Signals],
    *,
    has_own_group: bool,
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            words,
            env=environment,
            process_group=0 if has_own_group else None,
            preexec_fn=_in_child(mask),  # noqa: PLW1509 - no other threads in here
        )
    except OSError as error:
        raise CommandNotStartedError(
            words[0], error.strerror or str(error), is_missing=isinstance(error, FileNotFoundError)
        ) from error


def _in_child(mask: set[int | signal.Signals]) -> Callable[[], None]:
    """Return what the new process does first: receive signals, and end when this process does."""
    library, parent_id = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        library.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent_id:
            os._exit(1)  # the parent went before it could be asked
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return prepare


def _is_in_foreground() -> bool:
    """Return whether the terminal, if there is one, sends its signals to this process."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)


def _living(processes: Mapping[int, int]) -> list[int]:
    return [each for each, started in processes.items() if started_at(each) == started]


def _are_gone_within(processes: Mapping[int, int], seconds: float) -> bool:
    deadline_seconds = time.monotonic() + seconds
    while _living(processes):
        if time.monotonic() > deadline_seconds:
            return False
        time.sleep(0.02)
    return True
