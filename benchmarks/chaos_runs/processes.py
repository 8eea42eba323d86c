"""Starts the processes of a run by fork, waits for them, and sees that none is left."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_runs.system_calls import Watch, Watcher, be_watched

_BE_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of linux/prctl.h: children of children that ended come to this process."""
_ALL = 0x40000000
"""__WALL of linux/wait.h."""
_GRACE_SECONDS = 3.0
CRASHED = 99
"""The exit code of a process whose own code, not memfit's, has failed."""


@dataclass(slots=True, kw_only=True)
class Ends:
    """How processes ended.

    Args:
        codes: the exit code of each; negative for a signal.
        seconds: how long all of them took.
        overtime: those that had to be ended.
        left: what they have left behind.
    """

    codes: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0
    overtime: list[int] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


class _OvertimeError(Exception):
    """Say that processes take too long."""


def adopt_orphans() -> None:
    """Have what the children of this process leave behind come to it."""
    ctypes.CDLL(None).prctl(_BE_SUBREAPER, 1, 0, 0, 0)


def room() -> Path:
    """Return where rooms of runs are made: in memory, where a disk does not slow them down."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


def forked(action: Callable[[], Any], said: Path, watch: Watch | None = None) -> int:
    """Do something in a child; what it prints goes to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = CRASHED
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        if watch is not None:
            be_watched()
        found = action()
        sys.stdout.flush()
        code = found if isinstance(found, int) else 0
    except BaseException:  # noqa: BLE001 - told in the file, and by the code
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def wait_for(watches: Mapping[int, Watch | None], most_seconds: float) -> Ends:
    """Wait for children, some of them watched, and end what takes longer or is left behind."""
    watchers = {child: Watcher(child, watch) for child, watch in watches.items() if watch}
    ends, waiting = Ends(), set(watches)
    began = time.monotonic()

    def over(*_: object) -> None:
        raise _OvertimeError

    before = signal.signal(signal.SIGALRM, over)
    try:
        signal.setitimer(signal.ITIMER_REAL, most_seconds, 1.0)
        while waiting:
            try:
                _handle(os.waitpid(-1, _ALL), watchers, waiting, ends)
            except _OvertimeError:
                for child in waiting:
                    os.kill(child, signal.SIGKILL)
                    if child not in ends.overtime:
                        ends.overtime.append(child)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    ends.seconds = time.monotonic() - began
    _end_what_is_left(watchers, ends)
    return ends


def _handle(
    waited: tuple[int, int], watchers: Mapping[int, Watcher], waiting: set[int], ends: Ends
) -> None:
    child, status = waited
    if os.WIFSTOPPED(status):
        owner = watchers.get(child) or next(
            (each for each in watchers.values() if each.owns(child)),
            next(iter(watchers.values()), None),
        )
        if owner is not None:
            owner.stopped(child, status)
    elif child in waiting:
        waiting.discard(child)
        ends.codes[child] = os.waitstatus_to_exitcode(status)


def _end_what_is_left(watchers: Mapping[int, Watcher], ends: Ends) -> None:
    """Give what is left a moment to end, then end it and tell of it."""
    until = time.monotonic() + _GRACE_SECONDS
    while True:
        try:
            child, status = os.waitpid(-1, _ALL | os.WNOHANG)
        except ChildProcessError:
            return
        if child:
            _handle((child, status), watchers, set(), ends)
        elif time.monotonic() > until:
            left = _children()
            ends.left += [f"{each}: {_command(each)}" for each in left]
            for each in left:
                os.kill(each, signal.SIGKILL)
            until = time.monotonic() + _GRACE_SECONDS
        else:
            time.sleep(0.01)


def _children() -> list[int]:
    own = os.getpid()
    return [int(each) for each in Path(f"/proc/{own}/task/{own}/children").read_text().split()]


def _command(process_id: int) -> str:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return "gone"
