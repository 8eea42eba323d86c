"""Keeps batches on disk until their steps have to be carried out again."""

from __future__ import annotations

import os
import tempfile
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """Where a tensor lies in the file."""

    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch whose tensors lie in a file; its other parts are kept as they are."""

    spec: TreeSpec
    leaves: tuple[Any, ...]


class BatchFile:
    """Append batches to a temporary file and read them back."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="memfit-", buffering=0)  # noqa: SIM115 - kept open
        self._end = 0
        weakref.finalize(self, self._file.close)

    def store(self, batch: Any) -> StoredBatch:
        """Append a batch of tensors on the CPU; what fails may be done again.

        Raises:
            OSError: if there is no room.
        """
        leaves, spec = tree_flatten(batch)
        end, stored = self._end, []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                stored.append(leaf)
                continue
            values = leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            written = os.pwrite(self._file.fileno(), values.data, end)
            if written < values.nbytes:
                msg = "the disk takes no more of a batch"
                raise OSError(msg)
            stored.append(_StoredTensor(end, values.nbytes, leaf.dtype, leaf.shape))
            end += values.nbytes
        self._end = end
        return StoredBatch(spec, tuple(stored))

    def load(self, batch: StoredBatch) -> Any:
        """Read a batch back."""
        return tree_unflatten([self._loaded(leaf) for leaf in batch.leaves], batch.spec)

    def clear(self) -> None:
        """Forget all batches."""
        self._end = 0
        self._file.truncate(0)

    def _loaded(self, leaf: Any) -> Any:
        if not isinstance(leaf, _StoredTensor):
            return leaf
        if not leaf.num_bytes:
            return torch.empty(leaf.shape, dtype=leaf.dtype)
        content = bytearray(os.pread(self._file.fileno(), leaf.num_bytes, leaf.offset))
        return torch.frombuffer(content, dtype=leaf.dtype).reshape(leaf.shape)
