"""Keeps what tensors held before an operator wrote to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.session.forward_state.kept_tensors import KeptTensors

_WRITTEN_UNSAID = ("running_mean", "running_var")
"""Arguments that normalisations write to, though their operators' schemas do not say so."""


class WrittenTensors(TorchDispatchMode):
    """Copy each tensor of a set right before the first operator that writes to its memory.

    Writes through views, through ``.data`` and with ``out=`` are seen, as they are all operators;
    writes by other libraries into memory that they share are not. It costs microseconds per
    operator.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._memories = [tensor.data for tensor in tensors]
        self._kept: list[KeptTensors] = []
        self._in_storage: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors:
            self._in_storage.setdefault(_storage(tensor), []).append(tensor)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for written in _written(func, args, kwargs):
            tensors = self._in_storage.pop(_storage(written), None)
            if tensors is not None:
                self._kept.append(KeptTensors.of(tensors))
        return func(*args, **kwargs)

    def kept(self) -> list[KeptTensors]:
        """Give what the tensors held that were written to, or moved to other memory."""
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
        return [*self._kept, KeptTensors(tensors, memories, memories)]


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterable[torch.Tensor]:
    """Yield the tensors that a call writes to."""
    for position, argument in enumerate(func._schema.arguments):
        alias = argument.alias_info
        if (alias is None or not alias.is_write) and argument.name not in _WRITTEN_UNSAID:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        values = value if isinstance(value, (list, tuple)) else (value,)
        yield from (each for each in values if isinstance(each, torch.Tensor))
