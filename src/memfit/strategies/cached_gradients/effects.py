"""Keeps what a module changes in its buffers as one call on all rows would leave it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memfit.strategies.cached_gradients.rows import CannotCutError

_Values = dict[int, torch.Tensor | None]


class Effects:
    """The buffers of a module. Which of them its forward changes shows in the first piece of all.

    Changes of anything else (attributes, parameters) are not seen.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._slots = [(part, key) for part in module.modules() for key in part._buffers]
        self.changing: list[int] | None = None
        """Places of the buffers that change; None before the first piece."""

    def values(self, places: Iterable[int]) -> _Values:
        """Give what buffers hold."""
        return {place: self._slots[place][0]._buffers[self._slots[place][1]] for place in places}

    def put(self, values: Mapping[int, torch.Tensor | None]) -> None:
        """Set what buffers hold."""
        for place, value in values.items():
            part, key = self._slots[place]
            part._buffers[key] = value

    @contextmanager
    def on_copies(self, start: _Values) -> Iterator[_Values]:
        """Put copies of some values in their places for a while; give the copies."""
        before = self.values(start)
        copies = {place: _copy(value) for place, value in start.items()}
        self.put(copies)
        try:
            yield copies
        finally:
            self.put(before)

    @contextmanager
    def spared(self) -> Iterator[None]:
        """Let the module change copies of all buffers for a while."""
        with self.on_copies(self.values(range(len(self._slots)))):
            yield

    def watched(self) -> _Values:
        """Give what the buffers hold that may change: at first that is all of them."""
        return self.values(range(len(self._slots)) if self.changing is None else self.changing)

    def unforeseen(self) -> dict[int, tuple[int, int]]:
        """Give identity and version of the buffers that did not change so far."""
        rest = set(range(len(self._slots))) - set(self.changing or ())
        values = self.values(sorted(rest))
        return {p: (id(v), 0 if v is None else v._version) for p, v in values.items()}

    def name_of(self, place: int) -> str:
        """Name a buffer for a sentence."""
        part, key = self._slots[place]
        return f"{type(part).__name__}.{key}"


class CallEffects:
    """The effects of one call: every piece starts from the same values, and one outcome is kept.

    That is what one call on all rows leaves, if the outcome does not depend on the rows (the power
    iteration of spectral norm, counters). A call that is done again changes copies.
    """

    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        self._start = effects.watched()
        self._unforeseen = effects.unforeseen()
        self._outcome: _Values | None = None

    @contextmanager
    def piece(self) -> Iterator[None]:
        """Carry out a piece.

        Raises:
            CannotCutError: if it leaves something else in a buffer than the pieces before it.
        """
        with self._effects.on_copies(self._start) as copies:
            yield
            left = self._effects.values(copies)
        if self._effects.changing is None:
            changing = [place for place in copies if _is_changed(copies[place], left[place])]
            self._effects.changing = changing
            self._start = {place: self._start[place] for place in changing}
            left = {place: left[place] for place in changing}
        self._keep(left)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Carry out a piece once more, without effects."""
        with self._effects.on_copies(self._start):
            yield

    @torch.no_grad()
    def finish(self) -> None:
        """Leave what the pieces left, in the tensors that were there.

        Raises:
            CannotCutError: if a buffer was changed that earlier calls left alone.
        """
        unforeseen = self._effects.unforeseen()
        for place, state in self._unforeseen.items():
            if unforeseen.get(place, state) != state:
                name = self._effects.name_of(place)
                raise CannotCutError(f"it changes its buffer {name} now, and did not at first")
        own, outcome = self._start, self._outcome or {}
        self._start = {place: _copy(value) for place, value in own.items()}
        for place, value in outcome.items():
            mine = own[place]
            if mine is None or value is None or mine.shape != value.shape:
                self._effects.put({place: value})
            else:
                mine.copy_(value)

    def _keep(self, left: _Values) -> None:
        for place, value in (self._outcome or {}).items():
            if not _is_equal(value, left[place]):
                name = self._effects.name_of(place)
                raise CannotCutError(
                    f"what it leaves in its buffer {name} depends on the rows, as with running "
                    "statistics and codebooks, so pieces would leave something else"
                )
        self._outcome = left


def _copy(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.detach().clone()


def _is_changed(copy: torch.Tensor | None, left: torch.Tensor | None) -> bool:
    return left is not copy or (left is not None and left._version > 0)


def _is_equal(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    """Compare two outcomes bit by bit; those of tensors without values are taken for equal."""
    if first is None or second is None:
        return first is second
    if isinstance(first, FakeTensor) or isinstance(second, FakeTensor):
        return first.shape == second.shape
    return torch.equal(first, second)
