"""Copies of tensors that take nothing of the memory that training is planned for."""

from __future__ import annotations

import copy
import mmap
import tempfile
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memfit.live_state.snapshot import undisturbed


class DiskCopies:
    """Copy tensors to temporary files, from which they are read like any other tensor.

    The files are mapped into memory, and written over once nobody holds on to what they contain.
    Where the disk has no room, the copies lie in memory.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def __call__(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copy flat tensors of bytes, one after the other."""
        room = self._room(sum(part.numel() for part in parts))
        return torch.cat([part.cpu() for part in parts], out=room)

    def of(self, value: Any) -> Any:
        """Copy a tensor in its own shape; what is none, wraps others or is not dense, in memory."""
        with undisturbed():
            if not isinstance(value, torch.Tensor):
                return copy.deepcopy(value)
            found = value.detach()
            if found.layout is not torch.strided or is_traceable_wrapper_subclass(found):
                return found.clone()
            return self._room(found.nbytes).view(found.dtype).view(found.shape).copy_(found)

    def _room(self, num_bytes: int) -> torch.Tensor:
        fitting = [file for file in self._free if len(file) >= num_bytes]
        try:
            file = min(fitting, key=len) if fitting else _mapped(num_bytes)
        except (OSError, ValueError):  # a full disk, or nothing to copy
            return torch.empty(num_bytes, dtype=torch.uint8)
        if fitting:
            self._free.remove(file)
        room = torch.frombuffer(file, dtype=torch.uint8, count=num_bytes)
        weakref.finalize(room.untyped_storage(), self._free.append, file).atexit = False
        return room


def _mapped(num_bytes: int) -> mmap.mmap:
    """Map a new file; its blocks are written, as a mapped hole of a full disk ends the process."""
    with tempfile.TemporaryFile(prefix="memfit-") as file:
        file.write(bytes(num_bytes))
        file.flush()
        return mmap.mmap(file.fileno(), num_bytes)
