"""Watches the system calls of a process that change files, and ends or fails it at one of them.

A process that asks for it (``be_watched``) is stopped by the kernel before each system call that
writes, makes, moves or removes a file, whichever library makes it, and in all its threads: a filter
of seccomp picks the calls, and ptrace hands them to the one who watches. Linux on x86-64 alone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

_LIBRARY = ctypes.CDLL(None, use_errno=True)
_LIBRARY.ptrace.restype = ctypes.c_long
_LIBRARY.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]

# Of linux/ptrace.h, linux/prctl.h, linux/seccomp.h and linux/filter.h.
_TRACE_ME, _CONTINUE, _GET_REGISTERS, _SET_REGISTERS, _TO_NEXT_CALL = 0, 7, 12, 13, 24
_SET_OPTIONS, _EVENT_SECCOMP = 0x4200, 7
_OPTIONS = 0x1 | 0x2 | 0x4 | 0x8 | 0x10 | 0x80 | 0x100000
"""Mark calls, follow children, threads and programs, hear of seccomp, and end with the watcher."""
_NO_NEW_PRIVILEGES, _SET_FILTER, _FILTER_MODE = 38, 22, 2
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _TRACE = 0x7FFF0000, 0x7FF00000
_MARKED_TRAP = signal.SIGTRAP | 0x80

# Of asm/unistd_64.h. How a call is told: by a descriptor, by a path, or by a folder and a path.
_WRITES = {1: "write", 18: "pwrite", 20: "writev", 296: "pwritev"}
_BY_DESCRIPTOR = {**_WRITES, 77: "ftruncate", 285: "fallocate", 74: "fsync", 75: "fdatasync"}
_BY_DESCRIPTOR |= {91: "fchmod"}
_BY_PATH = {2: "open", 85: "creat", 82: "rename", 87: "unlink", 84: "rmdir", 83: "mkdir"}
_BY_PATH |= {76: "truncate", 90: "chmod", 86: "link", 88: "symlink"}
_BY_FOLDER = {257: "openat", 264: "renameat", 316: "renameat2", 263: "unlinkat", 258: "mkdirat"}
_BY_FOLDER |= {268: "fchmodat", 280: "utimensat", 265: "linkat"}
_CALLS = {**_BY_DESCRIPTOR, **_BY_PATH, **_BY_FOLDER}
_GROWING = {"write", "pwrite", "writev", "pwritev", "fallocate", "mkdir", "mkdirat"}
_OPENING = {"open": 1, "openat": 2}
"""Where their flags are among the arguments."""
_LENGTH_OF = {"write": 2, "pwrite": 2}
_HERE = -100
_OPENS_TO_CHANGE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Blow(StrEnum):
    """What happens at the call that is chosen."""

    KILL = "kill"
    """The process is gone before the call."""
    TEAR = "tear"
    """Half of what is written is, then the process is gone."""
    FULL = "full"
    """The disk is full from here on."""
    PARTLY = "partly"
    """The same, with half of this write done."""
    BRIEFLY = "briefly"
    """This call finds no room, and later ones do."""
    READ_ONLY = "read-only"
    """Nothing can be changed from here on."""
    QUOTA = "quota"
    """The quota is used up from here on."""
    BROKEN = "broken"
    """The device fails this call."""
    SHORT = "short"
    """Half of this write is done, as the system may, and nothing is wrong."""


ERRORS = {
    Blow.FULL: errno.ENOSPC,
    Blow.PARTLY: errno.ENOSPC,
    Blow.BRIEFLY: errno.ENOSPC,
    Blow.READ_ONLY: errno.EROFS,
    Blow.QUOTA: errno.EDQUOT,
    Blow.BROKEN: errno.EIO,
}
"""What the system says of each."""
_STAYS = {Blow.FULL, Blow.PARTLY, Blow.READ_ONLY, Blow.QUOTA}


class _Registers(ctypes.Structure):
    """Be ``user_regs_struct`` of sys/user.h."""

    _fields_ = [
        (name, ctypes.c_ulonglong)
        for name in (
            *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx"),
            *("rdx", "rsi", "rdi", "orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base"),
            *("gs_base", "ds", "es", "fs", "gs"),
        )
    ]

    def argument(self, number: int) -> int:
        """Return an argument of the call."""
        return int(getattr(self, ("rdi", "rsi", "rdx", "r10")[number]))


@dataclass(frozen=True, slots=True)
class Call:
    """A call that is about to be made."""

    name: str
    path: str
    is_opening: bool = False


@dataclass(slots=True, kw_only=True)
class Watch:
    """Which calls count, and what befalls which of them.

    Args:
        places: folders; calls on files elsewhere do not count.
        at: the number of the call, from 1; None only counts.
        blow: what happens there.
    """

    places: Sequence[Path]
    at: int | None = None
    blow: Blow = Blow.KILL
    seen: int = 0
    struck: Call | None = None
    """The call that it happened at."""


def can_be_watched() -> bool:
    """Return whether this system lets a process be watched."""
    return platform.system() == "Linux" and platform.machine() == "x86_64"


def be_watched() -> None:
    """Have the parent of this process told of each call that changes a file, from here on."""
    _called(_LIBRARY.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _ptrace(_TRACE_ME, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
    steps = [(_LOAD_WORD, 0, 0, 0)]  # the number of the call
    for position, number in enumerate(_CALLS):
        steps.append((_JUMP_IF_EQUAL, len(_CALLS) - position, 0, number))
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _TRACE)]
    packed = b"".join(struct.pack("HBBI", *step) for step in steps)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(buffer))
    _called(_LIBRARY.prctl(_SET_FILTER, _FILTER_MODE, ctypes.c_char_p(program), 0, 0))


class Watcher:
    """Watch one child of this process and its threads.

    Args:
        process_id: of the child, which has called ``be_watched`` or is about to.
        watch: which calls count, and what befalls one of them.
    """

    def __init__(self, process_id: int, watch: Watch) -> None:
        self.process_id = process_id
        self._watch = watch
        self._places = tuple(f"{place}/" for place in watch.places)
        self._threads: set[int] = set()
        self._dies_after: set[int] = set()

    def owns(self, process_id: int) -> bool:
        """Return whether a stop of this process or thread is this one's to handle."""
        return process_id == self.process_id or process_id in self._threads

    def stopped(self, thread: int, status: int) -> None:
        """Handle a stop, and let the thread go on."""
        sign, event = os.WSTOPSIG(status), status >> 16
        if sign == _MARKED_TRAP and thread in self._dies_after:
            os.kill(self.process_id, signal.SIGKILL)
            return
        request, handed_on = _CONTINUE, 0
        if thread not in self._threads:
            self._begin(thread)
        elif event == _EVENT_SECCOMP:
            request = _TO_NEXT_CALL if self._is_to_stop_after(thread) else _CONTINUE
        elif event == 0 and sign not in (signal.SIGSTOP, _MARKED_TRAP):
            handed_on = sign
        with suppress(ProcessLookupError):
            _ptrace(request, thread, handed_on)

    def _begin(self, thread: int) -> None:
        """Follow a thread; others that it begins are followed by themselves."""
        self._threads.add(thread)
        if thread == self.process_id:
            _ptrace(_SET_OPTIONS, thread, _OPTIONS)

    def _is_to_stop_after(self, thread: int) -> bool:
        """Let a call have its way or not; return whether its end is waited for."""
        watch, registers = self._watch, _Registers()
        _ptrace(_GET_REGISTERS, thread, ctypes.addressof(registers))
        call = _call_of(thread, registers)
        if call is None or not call.path.startswith(self._places):
            return False
        watch.seen += 1
        if watch.at is None or watch.seen < watch.at:
            return False
        if watch.seen > watch.at and watch.blow not in _STAYS:
            return False
        if watch.seen == watch.at:
            watch.struck = call
        return self._strike(thread, registers, call)

    def _strike(self, thread: int, registers: _Registers, call: Call) -> bool:
        watch, is_first = self._watch, self._watch.seen == self._watch.at
        halves = is_first and watch.blow in (Blow.TEAR, Blow.PARTLY, Blow.SHORT)
        if halves and call.name in _LENGTH_OF and registers.argument(2) > 1:
            registers.rdx //= 2
            _ptrace(_SET_REGISTERS, thread, ctypes.addressof(registers))
            if watch.blow is Blow.TEAR:
                self._dies_after.add(thread)
            return watch.blow is Blow.TEAR
        if watch.blow in (Blow.KILL, Blow.TEAR):
            os.kill(self.process_id, signal.SIGKILL)
            return False
        if watch.blow is not Blow.SHORT and _is_refused(call, watch.blow):
            registers.orig_rax = 2**64 - 1
            registers.rax = 2**64 - ERRORS[watch.blow]
            _ptrace(_SET_REGISTERS, thread, ctypes.addressof(registers))
        return False


def _is_refused(call: Call, blow: Blow) -> bool:
    if blow is Blow.READ_ONLY:
        return call.name not in ("fsync", "fdatasync")
    if blow is Blow.BROKEN:
        return True
    return call.name in _GROWING or call.is_opening


def _call_of(thread: int, registers: _Registers) -> Call | None:
    """Say what is about to be changed; None if nothing is."""
    number = int(registers.orig_rax)
    name, makes = _CALLS.get(number), False
    if name is None:
        return None
    if name in _OPENING:
        flags = registers.argument(_OPENING[name])
        if not flags & _OPENS_TO_CHANGE:
            return None
        makes = bool(flags & os.O_CREAT) or flags & os.O_TMPFILE == os.O_TMPFILE
    try:
        if number in _BY_DESCRIPTOR:
            path = str(Path(f"/proc/{thread}/fd/{registers.argument(0)}").readlink())
        else:
            is_by_folder = number in _BY_FOLDER
            path = _text_at(thread, registers.argument(1 if is_by_folder else 0))
            folder = ctypes.c_int(registers.argument(0)).value if is_by_folder else _HERE
            at = "cwd" if folder == _HERE else f"fd/{folder}"
            path = os.path.normpath(Path(f"/proc/{thread}/{at}").readlink() / path)
    except OSError:
        return None
    return Call(name, f"{path}/" if makes and Path(path).is_dir() else path, is_opening=makes)


def _text_at(thread: int, address: int) -> str:
    if not address:
        return ""
    with Path(f"/proc/{thread}/mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        return (memory.read(4096) or b"").partition(b"\0")[0].decode(errors="replace")


def _ptrace(request: int, thread: int, value: int = 0) -> None:
    _called(_LIBRARY.ptrace(request, thread, None, value))


def _called(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
