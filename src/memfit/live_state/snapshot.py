"""Everything that a job's code can reach and change, as it was at one moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from memfit.errors import MemfitError
from memfit.live_state.containers import differences, is_as_copied
from memfit.live_state.findings import Change, ChangeKind, Place
from memfit.live_state.generators import Access, access_to, are_same
from memfit.live_state.random_sources import GlobalRandomness, RandomSourcesReader
from memfit.live_state.reach import Found
from memfit.live_state.tensor_watch import TensorsThen
from memfit.live_state.tensors import put_back, what_differs
from memfit.live_state.watch import Watch, note_restore


@dataclass(frozen=True, slots=True)
class Values:
    """Arrays and generators as they were."""

    arrays: Sequence[tuple[Any, Place, Any]]
    generators: Sequence[tuple[Access, Any, Place, Any]]

    @classmethod
    def of(cls, found: Found) -> Self:
        """Keep them as they are now."""
        return cls(
            [(array, place, array.copy()) for array, place in found.arrays],
            [
                (access, generator, place, access.read(generator))
                for generator, place in found.generators
                if (access := access_to(type(generator))) is not None
            ],
        )

    def put_back(self) -> None:
        """Make them what they were."""
        for array, _, content in self.arrays:
            if array.shape != content.shape:
                array.shape = content.shape
            if not _have_same_bytes(array, content):
                array[...] = content
        put_generators_back(self.generators)

    def changes(self) -> Iterator[Change]:
        """Yield what differs now."""
        for array, place, content in self.arrays:
            if not _have_same_bytes(array, content):
                yield Change(*place, kind=ChangeKind.TENSOR, detail="has other values")
        for access, generator, place, state in self.generators:
            if not are_same(access.read(generator), state):
                yield Change(*place, kind=ChangeKind.GENERATOR, detail="was drawn from")


@dataclass(frozen=True, slots=True)
class Part:
    """What one walk found, as it was."""

    watch: Watch
    copies: Sequence[Sequence[Any]]
    places: Sequence[Place]
    """Of the tensors."""
    tensors: TensorsThen
    values: Values

    def put_back(self) -> Iterator[str]:
        """Make everything what it was; yield what could not be."""
        for kind, target, _, copy in self.watch.kept(self.copies):
            if not is_as_copied(kind, target, copy):
                kind.put(target, copy)
        for kept, place in zip(self.tensors.each(), self.places, strict=True):
            try:
                put_back(kept)
            except RuntimeError as error:
                yield f"{place.text} ({str(error).partition('.')[0]})"
        self.tensors.put_grads_back()
        self.values.put_back()

    def changes(self) -> Iterator[Change]:
        """Yield what differs now."""
        for kind, target, place, copy in self.watch.kept(self.copies):
            yield from differences(kind, target, copy, place)
        for kept, place in zip(self.tensors.each(), self.places, strict=True):
            if detail := what_differs(kept):
                yield Change(*place, kind=ChangeKind.TENSOR, detail=detail)
        for index in self.tensors.changed_grads():
            yield Change(*self.places[index].attribute("grad"), kind=ChangeKind.TENSOR)
        yield from self.values.changes()


class Snapshot:
    """Everything as it was at one moment; made by ``LiveState.snapshot``."""

    def __init__(
        self,
        parts: Sequence[Part],
        randomness: GlobalRandomness,
        reader: RandomSourcesReader,
    ) -> None:
        self._parts = parts
        self._randomness = randomness
        self._reader = reader

    def restore(self) -> None:
        """Put everything back: the same objects, the same bindings, the same content.

        Raises:
            MemfitError: if something could not be put back; everything else has been.
        """
        note_restore()
        with undisturbed():
            failed = [each for part in self._parts for each in part.put_back()]
            self._randomness.put_back()
        if failed:
            msg = (
                f"These could not be put back as they were before the step: {', '.join(failed)}. "
                "Continue from a checkpoint."
            )
            raise MemfitError(msg)

    @property
    def generators(self) -> list[Any]:
        """Return the states of the users' own generators; see ``put_generators_back``."""
        return [each for part in self._parts for each in part.values.generators]

    @property
    def randomness(self) -> GlobalRandomness:
        """Return the states of the global generators."""
        return self._randomness

    def changes(self) -> tuple[Change, ...]:
        """Return what differs now."""
        with undisturbed():
            return tuple(self._changes())

    def _changes(self) -> Iterator[Change]:
        for part in self._parts:
            yield from part.changes()
        for name, how_far in self._randomness.moved(self._reader).items():
            kind, detail = ChangeKind.GENERATOR, "was drawn from"
            yield Change(name, "", kind=kind, detail=detail, evidence=how_far)


def put_generators_back(generators: Iterable[Any]) -> None:
    """Set generators to states that ``Snapshot.generators`` has given."""
    for access, generator, _, state in generators:
        access.write(generator, state)


class undisturbed:  # noqa: N801 - used as a function, as no_grad is
    """Leave all modes for a while, so that nothing done inside is recorded or made fake.

    A class, as a generator's context takes ten times as long, and this is entered in every step.
    """

    __slots__ = ("_function", "_grad", "_modes")

    def __enter__(self) -> None:
        """Leave them."""
        self._modes: Any = None
        if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
            self._modes = _disable_current_modes()
            self._modes.__enter__()
        self._function = torch._C.DisableTorchFunction()
        self._function.__enter__()
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: Any) -> None:
        """Take them up again."""
        torch._C._set_grad_enabled(self._grad)
        self._function.__exit__(*error)
        if self._modes is not None:
            self._modes.__exit__(*error)


def _have_same_bytes(array: Any, content: Any) -> bool:
    if array.shape != content.shape or array.dtype != content.dtype:
        return False
    if array.dtype.hasobject:
        return all(one is other for one, other in zip(array.flat, content.flat, strict=True))
    return bool(np.ascontiguousarray(array).tobytes() == content.tobytes())
