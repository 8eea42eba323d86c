"""Locks of extension builds that died, for which DeepSpeed would wait without end.

The lock is a file that the builder holds open and deletes (torch/utils/file_baton.py, torch 2.13).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from torch.utils import cpp_extension

from memfit.errors import MemfitError, MemfitWarning

_NEEDED_ON_CPU = "deepspeed_shm_comm"
"""What an engine on the CPU always loads (deepspeed/comm/torch.py, 0.19.8)."""
_RELEASE_SECONDS = 1.0
"""A builder closes its lock a moment before it deletes it."""


def check_build_locks(
    device_type: str,
    *,
    root: Path | None = None,
    processes: Path = Path("/proc"),
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Refuse to wait for a build that died; warn of others that this run may come to need.

    Does not see builds of other machines that share the folder, or of other users.

    Raises:
        MemfitError: if an engine on this device would wait for it at once.
    """
    locks = [*_dead_locks(root or _own_root(), processes)]
    if locks:
        wait(_RELEASE_SECONDS)
        locks = [lock for lock in locks if lock in {*_dead_locks(lock.parent.parent, processes)}]
    for lock in locks:
        msg = (
            f"{lock} is left from a build of {lock.parent.name} that died: no process here holds "
            "it open. DeepSpeed would wait for it without end. If no other machine builds there "
            f"now, delete it: rm {lock}"
        )
        if device_type == "cpu" and lock.parent.name == _NEEDED_ON_CPU:
            raise MemfitError(msg)
        warnings.warn(msg, MemfitWarning, stacklevel=4)


def _own_root() -> Path:
    """Return the folder of the builds of this Python and this torch."""
    return Path(cpp_extension._get_build_directory("", verbose=False))


def _dead_locks(root: Path, processes: Path) -> Iterator[Path]:
    locks = [lock for lock in root.glob("*/lock") if lock.exists()]
    if not locks or not processes.is_dir():
        return
    held = {*_open_files(processes)}
    yield from (lock for lock in locks if str(lock.resolve()) not in held)


def _open_files(processes: Path) -> Iterator[str]:
    for link in processes.glob("[0-9]*/fd/*"):
        try:
            yield str(link.readlink())
        except OSError:
            continue  # ended meanwhile, or another user's
