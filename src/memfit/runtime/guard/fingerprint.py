"""Tells whether tensors have been changed by somebody, without reading all of them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch

_MOST_TENSORS = 24
_SAMPLES = 64
"""How many tensors, and how many values of each on a card, are read; all tensors' versions are."""
_PIECE_BYTES = 64
"""What is read of a tensor on the CPU at one place: a line of the cache, as its memory is cold."""
_BATCH_PIECES = 3
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
"""Others may not lie where they say."""


@dataclass(slots=True, eq=False)
class Fingerprint:
    """Versions of tensors, where they lie, and a few values of some of them.

    Versions show what autograd is told of; ``.data`` tells it nothing, which the values are for. A
    change of values that are not among those read goes unseen if autograd was not told either, so
    this is for batches alone that are not stored.
    """

    places: tuple[int, ...]
    """Addresses of the tensors, then their versions."""
    contents: tuple[bytes, ...]
    """Values of tensors on the CPU."""
    norms: tuple[torch.Tensor, ...]
    """Of values on cards, which are not waited for."""

    @classmethod
    def of_batch(cls, tensors: Sequence[torch.Tensor]) -> Self:
        """Take the fingerprint of the tensors of a batch, at a few places of each."""
        here, there = _split(tensors)
        contents = tuple(_content(tensor) for tensor in here)
        norms = _norms(_views(there)) if there else ()
        return cls(places_of(tensors), contents, norms)

    def __eq__(self, other: object) -> bool:
        """Compare; waits for a GPU only if the rest is the same."""
        if not isinstance(other, Fingerprint):
            return NotImplemented
        if self.places != other.places or self.contents != other.contents:
            return False
        if len(self.norms) != len(other.norms):
            return False
        pairs = zip(self.norms, other.norms, strict=True)
        return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]  # compared, never looked up


def places_of(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the addresses of tensors, then their versions."""
    try:
        addresses = [*map(torch.Tensor.data_ptr, tensors)]
    except RuntimeError:  # a sparse one has several
        strided = torch.strided
        addresses = [t.data_ptr() if t.layout is strided else 0 for t in tensors]
    return (*addresses, *[tensor._version for tensor in tensors])


def _split(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Choose tensors to read: those whose memory is here, and others."""
    step = -(-len(tensors) // _MOST_TENSORS) if tensors else 1
    here, there = [], []
    for tensor in tensors[::step]:
        if tensor.layout is not torch.strided or not tensor.numel():
            continue
        if tensor.is_cpu and type(tensor) in _PLAIN_TYPES and tensor.data_ptr():
            here.append(tensor)
        elif tensor.is_floating_point():
            there.append(tensor)
    return here, there


def _content(tensor: torch.Tensor) -> bytes:
    return b"".join([ctypes.string_at(*piece) for piece in _pieces(tensor, _BATCH_PIECES)])


def _pieces(tensor: torch.Tensor, count: int) -> list[tuple[int, int]]:
    """Choose what to read, address and bytes: at the beginning, and evenly spread after it."""
    address, num_bytes = tensor.data_ptr(), tensor.nbytes
    if not tensor.is_contiguous():
        return [(address, tensor.element_size())]
    if num_bytes <= count * _PIECE_BYTES:
        return [(address, num_bytes)]
    step = num_bytes // count // _PIECE_BYTES * _PIECE_BYTES  # whole values
    return [(address + step * number, _PIECE_BYTES) for number in range(count)]


def _views(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return views of some values of tensors, by device and type."""
    views: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        views.setdefault((tensor.device, tensor.dtype), []).append(_sampled(tensor))
    return list(views.values())


def _norms(grouped: Iterable[list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Return the norms of views, a tensor per group."""
    return tuple([_norms_of(group) for group in grouped])


def _norms_of(views: list[torch.Tensor]) -> torch.Tensor:
    # Half precision would hide small changes.
    dtype = torch.promote_types(views[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(views, 2.0, dtype=dtype))


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a few values, evenly spread if they lie side by side."""
    values = tensor.detach()
    if not values.is_contiguous():
        return values[(0,) * (values.dim() - 1)] if values.dim() else values
    count = min(_SAMPLES, values.numel())
    return values.as_strided((count,), (values.numel() // count,))
