"""Has the Linux kernel refuse writes outside some folders, for the rest of this process.

Compiled code writes files without asking Python. Landlock lets a process give up its own rights to
write; there is no way back, and no privilege is needed
(https://docs.kernel.org/userspace-api/landlock.html).
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""System calls, by number: the same on all architectures (include/uapi/asm-generic/unistd.h)."""
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_NO_NEW_PRIVILEGES = 38
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_FOLDER_RIGHTS = sum(1 << bit for bit in range(4, 14))
"""Remove and make directory entries, and link across folders (include/uapi/linux/landlock.h)."""
_FIRST_WITH_REFER, _FIRST_WITH_TRUNCATE = 2, 3
_REFER = 1 << 13
_ALWAYS = ("/dev/null", "/dev/tty", "/dev/shm", "/dev/pts", "/proc/self")


class _Ruleset(ctypes.Structure):
    """``struct landlock_ruleset_attr``: which rights are handled at all."""

    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _Beneath(ctypes.Structure):
    """``struct landlock_path_beneath_attr``."""

    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def lock_writes(folders: Sequence[Path]) -> bool:
    """Refuse writing outside folders from now on, in this process and its children.

    Returns:
        Whether the kernel does so; false on other systems and on kernels before 5.13.
    """
    if platform.system() != "Linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(
        _CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG)
    )
    if version < 1:
        return False
    handled = _WRITE_FILE | _FOLDER_RIGHTS
    if version < _FIRST_WITH_REFER:
        handled &= ~_REFER
    if version >= _FIRST_WITH_TRUNCATE:
        handled |= _TRUNCATE
    rules = _Ruleset(handled_access_fs=handled)
    ruleset = libc.syscall(
        _CREATE_RULESET,
        ctypes.byref(rules),
        ctypes.c_size_t(ctypes.sizeof(rules)),
        ctypes.c_uint32(0),
    )
    if ruleset < 0:
        return False
    try:
        for path in (*map(str, folders), *_ALWAYS):
            _allow(libc, ruleset, path, handled)
        if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
            return False
        return bool(libc.syscall(_RESTRICT_SELF, ruleset, ctypes.c_uint32(0)) == 0)
    finally:
        os.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, handled: int) -> None:
    """Allow writing beneath a path; one that does not exist is left out."""
    try:
        number = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rights = handled if Path(path).is_dir() else handled & (_WRITE_FILE | _TRUNCATE)
        rule = _Beneath(allowed_access=rights, parent_fd=number)
        libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), ctypes.c_uint32(0))
    finally:
        os.close(number)
