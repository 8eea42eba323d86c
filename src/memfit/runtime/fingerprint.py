"""Tells whether tensors have been changed by somebody, without reading all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils._pytree import tree_leaves

_MOST_TENSORS = 24
_SAMPLES = 64
"""How many tensors, and how many values of each, are read; all tensors' versions are."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Versions of tensors, where they lie, and norms of a few values of some of them.

    Versions show what autograd is told of; fused optimizers and ``.data`` tell it nothing, which
    the norms are for. A change of values that are not among those read goes unseen if autograd was
    not told either.
    """

    places: tuple[tuple[int, int], ...]
    """Address and version of each tensor."""
    norms: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Self:
        """Take the fingerprint of tensors as they are."""
        return cls(places_of(tensors), _norms(_views(tensors)))

    def __eq__(self, other: object) -> bool:
        """Compare; waits for a GPU only if the versions are the same."""
        if not isinstance(other, Fingerprint):
            return NotImplemented
        if self.places != other.places or len(self.norms) != len(other.norms):
            return False
        pairs = zip(self.norms, other.norms, strict=True)
        return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)

    def is_near(self, other: Fingerprint) -> bool:
        """Say whether the values are the same but for rounding, wherever they lie."""
        if len(self.norms) != len(other.norms):
            return False
        pairs = zip(self.norms, other.norms, strict=True)
        return all(torch.allclose(a, b, rtol=1e-3, equal_nan=True) for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]  # compared, never looked up


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """List the tensors of a pytree."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


class RepeatedFingerprint:
    """Take the fingerprint of the same tensors again and again, at less cost."""

    def __init__(self) -> None:
        self._addresses: tuple[int, ...] = ()
        self._grouped: list[list[torch.Tensor]] = []

    def of(self, tensors: Sequence[torch.Tensor]) -> Fingerprint:
        """Take the fingerprint of tensors as they are."""
        places = places_of(tensors)
        addresses = tuple(address for address, _ in places)
        if addresses != self._addresses:
            self._addresses, self._grouped = addresses, _views(tensors)
        return Fingerprint(places, _norms(self._grouped))


def places_of(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    """Give address and version of each tensor."""
    return tuple((tensor.data_ptr(), tensor._version) for tensor in tensors)


def _views(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Give views of some values of some tensors, by device and type."""
    step = -(-len(tensors) // _MOST_TENSORS) if tensors else 1
    views: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors[::step]:
        if tensor.is_floating_point() and tensor.numel() and tensor.layout is torch.strided:
            views.setdefault((tensor.device, tensor.dtype), []).append(_sampled(tensor))
    return list(views.values())


def _norms(grouped: Iterable[list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Give the norms of views, a tensor per group."""
    return tuple(_norms_of(group) for group in grouped)


def _norms_of(views: list[torch.Tensor]) -> torch.Tensor:
    # Half precision would hide small changes.
    dtype = torch.promote_types(views[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(views, 2.0, dtype=dtype))


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Give a view of a few values, evenly spread if they lie side by side."""
    values = tensor.detach()
    if not values.is_contiguous():
        return values[(0,) * (values.dim() - 1)] if values.dim() else values
    count = min(_SAMPLES, values.numel())
    return values.as_strided((count,), (values.numel() // count,))
