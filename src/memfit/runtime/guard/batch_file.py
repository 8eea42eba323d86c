"""Keeps batches on disk until their steps have to be run again."""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """Where a tensor lies in the file."""

    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: torch.Size
    remainder: int
    """Of its address, by a line of the cache: kernels round by it (a part of a batch begins
    anywhere)."""


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch whose tensors lie in a file; the rest, such as sparse tensors, is kept as it is."""

    spec: TreeSpec | None
    """None where the batch is one tensor."""
    leaves: tuple[Any, ...]


class BatchFile:
    """Append batches to a temporary file and read them back.

    The file keeps its length when all batches are forgotten: memory of the system's that was
    written to before takes a tenth of the time of new one.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="memfit-", buffering=0)  # noqa: SIM115 - kept open
        self._end = 0
        weakref.finalize(self, self._file.close)

    def store(self, batch: Any) -> StoredBatch:
        """Append a batch of tensors on the CPU; what fails may be done again.

        Raises:
            OSError: if there is no room.
        """
        leaves, spec = ([batch], None) if isinstance(batch, torch.Tensor) else tree_flatten(batch)
        end, stored = self._end, []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
                stored.append(leaf)
                continue
            values = leaf if _lies_plainly(leaf) else leaf.detach().resolve_conj().resolve_neg()
            values = values.contiguous()
            num_bytes = values.nbytes
            content = (ctypes.c_char * num_bytes).from_address(values.data_ptr())
            if os.pwrite(self._file.fileno(), content, end) < num_bytes:
                msg = "the disk takes no more of a batch"
                raise OSError(msg)
            remainder = values.data_ptr() % _LINE_BYTES
            remainder -= remainder % values.element_size()
            stored.append(_StoredTensor(end, num_bytes, leaf.dtype, leaf.shape, remainder))
            end += num_bytes
        self._end = end
        return StoredBatch(spec, tuple(stored))

    def load(self, batch: StoredBatch) -> Any:
        """Read a batch back."""
        leaves = [self._loaded(leaf) for leaf in batch.leaves]
        return leaves[0] if batch.spec is None else tree_unflatten(leaves, batch.spec)

    @torch.no_grad()
    def put_back(self, batch: StoredBatch, tensors: Sequence[torch.Tensor]) -> None:
        """Write what was stored into the tensors of a batch, in their order, where they differ."""
        stored = [leaf for leaf in batch.leaves if isinstance(leaf, _StoredTensor | torch.Tensor)]
        for leaf, tensor in zip(stored, tensors, strict=True):
            if isinstance(leaf, _StoredTensor):
                content = self._loaded(leaf)
                if not torch.equal(content.view_as(tensor), tensor):
                    tensor.copy_(content)

    def forget_from(self, batch: StoredBatch) -> None:
        """Forget a batch that was stored last."""
        places = [leaf.offset for leaf in batch.leaves if isinstance(leaf, _StoredTensor)]
        self._end = min(places, default=self._end)

    def clear(self) -> None:
        """Forget all batches."""
        self._end = 0

    def close(self) -> None:
        """Drop the file."""
        self._file.close()

    def _loaded(self, leaf: Any) -> Any:
        if not isinstance(leaf, _StoredTensor):
            return leaf
        if not leaf.num_bytes:
            return torch.empty(leaf.shape, dtype=leaf.dtype)
        room = torch.empty(leaf.num_bytes + _LINE_BYTES, dtype=torch.uint8)
        start = (leaf.remainder - room.data_ptr()) % _LINE_BYTES
        content = room[start : start + leaf.num_bytes]
        content.numpy()[:] = np.frombuffer(
            os.pread(self._file.fileno(), leaf.num_bytes, leaf.offset), dtype=np.uint8
        )
        return content.view(leaf.dtype).reshape(leaf.shape)


def _lies_plainly(tensor: torch.Tensor) -> bool:
    return not tensor.is_conj() and not tensor.is_neg()
