"""Notes which tensors operators write to, and which generators they draw from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memfit.live_state.findings import Place
from memfit.trace.events import Phase
from memfit.trace.modes import OperatorMode
from memfit.trace.operators import changed_tensors, draws, operator_name, tensors_in
from memfit.trace.origins import line_of_caller

_STATISTICS = ("running_mean", "running_var")
_IS_TRAINING = ("training", "train", "use_input_stats")


@dataclass(frozen=True, slots=True)
class Write:
    """An operator wrote to a tensor that outlives the step."""

    place: Place
    phase: Phase
    source_line: str


@dataclass(frozen=True, slots=True)
class Draw:
    """An operator drew random numbers."""

    place: Place | None
    """Where the generator is; None for torch's own."""
    num_elements: int
    source_line: str


class WriteNoter(OperatorMode):
    """Note writes to tensors that were there before, and draws of random numbers.

    Args:
        generators: of the user, with their places.
    """

    def __init__(self, generators: Iterable[tuple[Any, Place]] = ()) -> None:
        super().__init__()
        self.phase = Phase.SETUP
        self.writes: list[Write] = []
        self.draws: list[Draw] = []
        self._generators = [pair for pair in generators if isinstance(pair[0], torch.Generator)]
        self._places: dict[int, Place] = {}
        self._optimizers: set[int] = set()
        self._kept: list[torch.UntypedStorage] = []

    def watch(
        self,
        tensors: Iterable[tuple[torch.Tensor, Place, bool]],
        optimizers: Iterable[torch.Tensor],
    ) -> None:
        """Say which tensors outlive the step, and which of them the optimizer may write."""
        for tensor, place, _ in tensors:
            for storage in _storages(tensor):
                self._kept.append(storage)  # so that no other storage can take its place
                self._places.setdefault(storage._cdata, place)
        self._optimizers = {one._cdata for tensor in optimizers for one in _storages(tensor)}

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        out = func(*args, **kwargs)
        for tensor in _written(func, args, kwargs):
            self._note_write(tensor)
        if draws(func, args, kwargs):
            elements = sum(tensor.numel() for tensor in tensors_in(out))
            place = self._place_of(_generator_in(args, kwargs))
            self.draws.append(Draw(place, elements, line_of_caller()))
        return out

    def _place_of(self, given: Any) -> Place | None:
        """Find the user's generator that an operator was given; None for torch's own.

        Operators are given another object for the same generator.
        """
        if given is None or given._cdata == torch.default_generator._cdata:  # type: ignore[attr-defined]
            return None
        known = (place for generator, place in self._generators if generator._cdata == given._cdata)
        return next(known, Place("torch", "generator that nothing keeps"))

    def _note_write(self, tensor: torch.Tensor) -> None:
        for storage in _storages(tensor):
            place = self._places.get(storage._cdata)
            updates = self.phase is Phase.OPTIMIZER and storage._cdata in self._optimizers
            if place is not None and not updates:
                self.writes.append(Write(place, self.phase, line_of_caller()))


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    if tensor.layout is torch.sparse_coo:
        yield tensor._indices().untyped_storage()
        yield tensor._values().untyped_storage()
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator writes to."""
    yield from changed_tensors(func, args, kwargs)
    if "batch_norm" in operator_name(func):
        yield from _running_statistics(func._schema, args, kwargs)


def _running_statistics(
    schema: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    """Yield the statistics that batch normalisation updates, of which its schema says nothing."""
    if schema.is_mutable or "backward" in schema.name:
        return
    names = [argument.name for argument in schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if any(given.get(name) for name in _IS_TRAINING):
        yield from tensors_in([given.get(name) for name in _STATISTICS])


def _generator_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the generator that an operator was told to draw from; None for torch's own."""
    found = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
    return found[0] if found else None
