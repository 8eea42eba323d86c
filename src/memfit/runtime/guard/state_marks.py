"""Tells whether repeated steps come through the very state in which an update was cut."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memfit.live_state.snapshot import undisturbed
from memfit.trace.modes import OperatorMode
from memfit.units import MIB

Tensors = Mapping[str, torch.Tensor | None]
"""By name; None for what is not there, such as a gradient that was dropped."""
_CHUNK_BYTES = 16 * MIB
_SAMPLE_BYTES = 64
_NEAR = 1e-3


@dataclass(frozen=True, slots=True)
class Mark:
    """What one tensor held: to the bit on the CPU, but for rounding on a card."""

    form: tuple[torch.Size, torch.dtype] | None
    """None where there was no tensor."""
    sample: bytes
    """A few of its bytes, to tell most others at once."""
    digest: bytes
    norm: float
    """Of a tensor on a card; 0 on the CPU."""

    @classmethod
    def of(cls, tensor: torch.Tensor | None) -> Mark:
        """Mark a tensor as it is; reads all of it."""
        if tensor is None:
            return cls(None, b"", b"", 0.0)
        form = tensor.shape, tensor.dtype
        parts = [*_strided_parts(tensor)]
        if _repeats_bits(parts):
            return cls(form, _sample_of(parts), _digest_of(parts), 0.0)
        return cls(form, b"", b"", _norm_of(parts))

    def may_be_of(self, tensor: torch.Tensor | None) -> bool:
        """Compare form and sample: False is certain."""
        if tensor is None or self.form is None:
            return tensor is None and self.form is None
        if self.form != (tensor.shape, tensor.dtype):
            return False
        parts = [*_strided_parts(tensor)]
        return not _repeats_bits(parts) or self.sample == _sample_of(parts)

    def is_of(self, tensor: torch.Tensor | None) -> bool:
        """Return whether a tensor holds the same."""
        if not self.may_be_of(tensor):
            return False
        if tensor is None:
            return True
        parts = [*_strided_parts(tensor)]
        if _repeats_bits(parts):
            return self.digest == _digest_of(parts)
        now = _norm_of(parts)
        is_nan = math.isnan(now) and math.isnan(self.norm)
        return is_nan or math.isclose(now, self.norm, rel_tol=_NEAR)


class PassedState(OperatorMode):
    """Look out, operator by operator, for a state in which a step was cut.

    An operator over many tensors may have been cut between two of them, so each tensor may be as
    it is before or after the operator.

    Args:
        marks: of the state, by name.
        tensors: gives the tensors as they are, by name.
    """

    def __init__(self, marks: Mapping[str, Mark], tensors: Callable[[], Tensors]) -> None:
        super().__init__()
        self._marks = marks
        self._tensors = tensors
        self.was_passed = False
        self.others: tuple[str, ...] = (*marks,)
        """Tensors that never held what they should; the fewest of them at any time."""

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.was_passed:
            return func(*args, **kwargs)
        self.look()
        before = frozenset[str]()
        if func._schema.is_mutable and not self.was_passed:
            with undisturbed():
                before = self._held_by(_storages((args, kwargs)))
        try:
            return func(*args, **kwargs)
        finally:
            self.look(before)

    def look(self, before: frozenset[str] = frozenset()) -> None:
        """See whether all tensors are as they were, or those named were so before."""
        if not self.was_passed:
            with undisturbed():
                self._look(before)

    def _look(self, before: frozenset[str]) -> None:
        now = self._tensors()
        others = [
            name
            for name, mark in self._marks.items()
            if name not in before and not mark.may_be_of(now.get(name))
        ]
        if not others:
            others = [
                name
                for name, mark in self._marks.items()
                if name not in before and not mark.is_of(now.get(name))
            ]
        if len(others) < len(self.others):
            self.others = (*others,)
        self.was_passed = not others and now.keys() <= self._marks.keys()

    def _held_by(self, storages: frozenset[int]) -> frozenset[str]:
        """Name the tensors that an operator is about to change and that are as they were."""
        now = self._tensors()
        return frozenset(
            name
            for name, mark in self._marks.items()
            if (tensor := now.get(name)) is not None
            and not storages.isdisjoint(_storages(tensor))
            and mark.is_of(tensor)
        )


def marks_of(tensors: Tensors) -> dict[str, Mark]:
    """Mark all tensors as they are."""
    with undisturbed():
        return {name: Mark.of(tensor) for name, tensor in tensors.items()}


def _strided_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Take a tensor apart into those that lie in plain memory."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            if isinstance(part := getattr(tensor, name), torch.Tensor):
                yield from _strided_parts(part)
    elif tensor.layout is torch.strided:
        yield tensor.detach()
    else:
        yield tensor.detach().to_dense()


def _repeats_bits(parts: Iterable[torch.Tensor]) -> bool:
    """Return whether kernels give the same bits again where tensors lie."""
    return torch.are_deterministic_algorithms_enabled() or all(part.is_cpu for part in parts)


def _flat_bytes(part: torch.Tensor) -> torch.Tensor:
    return part.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _sample_of(parts: Iterable[torch.Tensor]) -> bytes:
    return b"".join([_ends_of(part) for part in parts])


def _ends_of(part: torch.Tensor) -> bytes:
    """Read the first and the last few bytes."""
    if not part.numel() or not part.is_contiguous():
        return b""
    flat = _flat_bytes(part)
    return bytes(torch.cat([flat[:_SAMPLE_BYTES], flat[-_SAMPLE_BYTES:]]).cpu().numpy())


def _digest_of(parts: Iterable[torch.Tensor]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        flat = _flat_bytes(part)
        for start in range(0, flat.numel(), _CHUNK_BYTES):
            digest.update(flat[start : start + _CHUNK_BYTES].cpu().numpy().data)
    return digest.digest()


def _norm_of(parts: Iterable[torch.Tensor]) -> float:
    """Return the norm over all parts."""
    norms = [torch.linalg.vector_norm(p.to(torch.float32)) for p in parts if not p.is_complex()]
    return math.hypot(*map(float, norms))


def _storages(held: Any) -> frozenset[int]:
    return frozenset(
        part.untyped_storage()._cdata
        for leaf in tree_leaves(held)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        for part in _strided_parts(leaf)
    )
