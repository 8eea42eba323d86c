"""Keeps what tensors held before an operator wrote to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from memfit.forward_state.kept_tensors import KeptTensors
from memfit.trace.modes import OperatorMode
from memfit.trace.operators import changed_tensors, tensors_in

_WRITTEN_UNSAID = ("running_mean", "running_var")
"""Arguments that normalisations write to, though their operators' schemas do not say so."""


class WrittenTensors(OperatorMode):
    """Copy each tensor of a set right before the first operator that writes to its memory.

    Writes through views, through ``.data`` and with ``out=`` are seen, as they are all operators;
    writes by other libraries into memory that they share are not. It costs microseconds per
    operator.

    Args:
        tensors: of which copies are made.
        copied_before: others that are only noted if they are written to.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], copied_before: Sequence[torch.Tensor] = ()
    ) -> None:
        super().__init__()
        self._tensors = tensors
        self._memories = [tensor.data for tensor in tensors]
        self._kept: list[KeptTensors] = []
        self._in_storage: dict[int, list[torch.Tensor]] = {}
        self._noted_only: dict[int, list[torch.Tensor]] = {}
        for each, places in ((tensors, self._in_storage), (copied_before, self._noted_only)):
            for tensor in each:
                places.setdefault(_storage(tensor), []).append(tensor)
        self.written: list[torch.Tensor] = []
        """Those that were written to."""

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        for written in _written(func, args, kwargs):
            storage = _storage(written)
            self.written += self._noted_only.pop(storage, ())
            if tensors := self._in_storage.pop(storage, None):
                self._kept.append(KeptTensors.of(tensors))
                self.written += tensors
        return func(*args, **kwargs)

    def kept(self) -> list[KeptTensors]:
        """Return what the tensors held that were written to, or moved to other memory."""
        known = {id(tensor) for kept in self._kept for tensor in kept.tensors}
        pairs = zip(self._tensors, self._memories, strict=True)
        moved = [
            (tensor, memory)
            for tensor, memory in pairs
            if _storage(tensor) != _storage(memory) and id(tensor) not in known
        ]
        if not moved:
            return self._kept
        tensors, memories = zip(*moved, strict=True)
        self.written += tensors
        versions = [tensor._version for tensor in tensors]
        return [*self._kept, KeptTensors(tensors, memories, memories, versions)]


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterable[torch.Tensor]:
    """Yield the tensors that a call writes to."""
    yield from changed_tensors(func, args, kwargs)
    for place, name in _written_unsaid(func):
        yield from tensors_in(args[place] if place < len(args) else kwargs.get(name))


@cache
def _written_unsaid(func: Any) -> tuple[tuple[int, str], ...]:
    """Return places and names of the arguments that are written to though no schema says so."""
    names = enumerate(argument.name for argument in func._schema.arguments)
    return tuple((place, name) for place, name in names if name in _WRITTEN_UNSAID)
