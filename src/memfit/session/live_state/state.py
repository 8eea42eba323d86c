"""What a job's code can reach and change: found, kept, put back, compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from memfit.errors import MemfitError
from memfit.session.live_state.containers import CLASS, FUNCTION, differences
from memfit.session.live_state.findings import Change, ChangeKind, Obstacle
from memfit.session.live_state.generators import access_to, are_same
from memfit.session.live_state.ownership import package_of
from memfit.session.live_state.tensors import keep, put_back, what_differs
from memfit.session.live_state.walk import Found, Scope, Walk
from memfit.session.random_sources import GlobalRandomness, RandomSourcesReader

if TYPE_CHECKING:
    from memfit.session.session import Session


class LiveState:
    """What a job's code can reach and change: found once, looked at again cheaply.

    Args:
        roots: where the walk begins, by name: the model, the optimizer, the job's functions.
        leave_out: tensors whose content the caller keeps himself: what they are bound to is
            watched, their content is not copied.
        gradients: whether ``.grad`` of tensors belongs to the state.
    """

    def __init__(
        self,
        roots: Mapping[str, object],
        *,
        leave_out: Iterable[torch.Tensor] = (),
        gradients: bool = False,
    ) -> None:
        self._roots = dict(roots)
        self._scope = replace(
            Scope.of(leave_out, gradients=gradients), own_packages=_packages_of(self._roots)
        )
        self._random = RandomSourcesReader()
        self._found = self._walked()

    @classmethod
    def of(
        cls, session: Session, *, copies_parameters: bool = False, gradients: bool = False
    ) -> LiveState:
        """Watch a session: model, optimizer, the job's functions and what is stateful besides.

        Args:
            session: of the job.
            copies_parameters: whether to keep the content of parameters and optimizer states too.
            gradients: whether ``.grad`` belongs to the state.
        """
        left_out = () if copies_parameters else [*_kept_by_others(session)]
        return cls(roots_of(session), leave_out=left_out, gradients=gradients)

    def copied_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """List the tensors whose content is copied, with their places."""
        tensors = self._found.tensors
        return [(place.text, tensor) for tensor, place, is_copied in tensors if is_copied]

    def code(self) -> Iterator[CodeType]:
        """Yield the code of the user's functions and classes that can be reached."""
        for kind, group in self._found.groups.items():
            if kind is FUNCTION:
                yield from (function.__code__ for function in group.targets)
            elif kind is CLASS:
                for owner in group.targets:
                    yield from _code_of_class(owner)

    @property
    def obstacles(self) -> tuple[Obstacle, ...]:
        """Say what cannot be put back."""
        return tuple(dict.fromkeys(self._found.obstacles))

    def snapshot(self) -> Snapshot:
        """Keep everything as it is now."""
        with undisturbed():
            self._found = self._walked()
            return Snapshot(self._found, self._random, gradients=self._scope.gradients)

    def _walked(self) -> Found:
        with undisturbed():
            return Walk(self._scope).go(self._roots)


class Snapshot:
    """Everything as it was at one moment; made by ``LiveState.snapshot``."""

    def __init__(self, found: Found, reader: RandomSourcesReader, *, gradients: bool) -> None:
        self._gradients = gradients
        self._copies = [
            (kind, target, place, kind.copy(target))
            for kind, group in found.groups.items()
            for target, place in zip(group.targets, group.places, strict=True)
        ]
        self._tensors = [
            (keep(tensor, with_content=with_content, with_grad=gradients), place)
            for tensor, place, with_content in found.tensors
        ]
        self._arrays = [(array, place, array.copy()) for array, place in found.arrays]
        self._generators = [
            (access, generator, place, access.read(generator))
            for generator, place in found.generators
            if (access := access_to(type(generator))) is not None
        ]
        self._reader = reader
        self._globals = GlobalRandomness.here(reader)

    def restore(self) -> None:
        """Put everything back: the same objects, the same bindings, the same content.

        Raises:
            MemfitError: if something could not be put back; everything else has been.
        """
        failed: list[str] = []
        with undisturbed():
            for kind, target, _, copy in self._copies:
                kind.put(target, copy)
            for kept, place in self._tensors:
                try:
                    put_back(kept, with_grad=self._gradients)
                except RuntimeError as error:
                    failed.append(f"{place.text} ({str(error).partition('.')[0]})")
            for array, _, content in self._arrays:
                if array.shape != content.shape:
                    array.shape = content.shape
                array[...] = content
            put_generators_back(self._generators)
            self._globals.put_back()
        if failed:
            msg = (
                f"These could not be put back as they were before the step: {', '.join(failed)}. "
                "Continue from a checkpoint, or keep them detached from the graph."
            )
            raise MemfitError(msg)

    @property
    def generators(self) -> Sequence[Any]:
        """Give the states of the users' own generators; see ``put_generators_back``."""
        return self._generators

    @property
    def randomness(self) -> GlobalRandomness:
        """Give the states of the global generators."""
        return self._globals

    def changes(self) -> tuple[Change, ...]:
        """Say what differs now."""
        with undisturbed():
            return tuple(self._changes())

    def _changes(self) -> Iterator[Change]:
        for kind, target, place, copy in self._copies:
            yield from differences(kind, target, copy, place)
        for kept, place in self._tensors:
            if detail := what_differs(kept, with_grad=self._gradients):
                yield Change(*place, kind=ChangeKind.TENSOR, detail=detail)
        yield from self._changes_of_values()

    def _changes_of_values(self) -> Iterator[Change]:
        for array, place, content in self._arrays:
            if not _have_same_bytes(array, content):
                yield Change(*place, kind=ChangeKind.TENSOR, detail="has other values")
        for access, generator, place, state in self._generators:
            if not are_same(access.read(generator), state):
                yield Change(*place, kind=ChangeKind.GENERATOR, detail="was drawn from")
        for name in self._globals.moved(self._reader):
            yield Change(name, "", kind=ChangeKind.GENERATOR, detail="was drawn from")


def put_generators_back(generators: Iterable[Any]) -> None:
    """Set generators to states that ``Snapshot.generators`` has given."""
    for access, generator, _, state in generators:
        access.write(generator, state)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Leave all modes for a while, so that nothing done inside is recorded or made fake."""
    with contextlib.ExitStack() as stack:
        if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
            stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch.no_grad())
        yield


def _have_same_bytes(array: Any, content: Any) -> bool:
    if array.shape != content.shape or array.dtype != content.dtype:
        return False
    if array.dtype.hasobject:
        return all(one is other for one, other in zip(array.flat, content.flat, strict=True))
    return bool(np.ascontiguousarray(array).tobytes() == content.tobytes())


def _packages_of(roots: Mapping[str, Any]) -> frozenset[str]:
    """Name the packages that the roots' functions come from: they are the user's."""
    functions = (value for value in roots.values() if isinstance(value, FunctionType))
    return frozenset(package_of(function.__module__ or "") for function in functions)


def roots_of(session: Session) -> dict[str, object]:
    """Name what a session's code is reached from."""
    job = session.job
    return {
        "model": session.model,
        "optimizer": session.optimizer,
        "loss": job.loss,
        "batch function": job.batch,
        "model function": job.model,
        "optimizer function": job.optimizer,
        **session.stateful,
    }


def _code_of_class(owner: type) -> Iterator[CodeType]:
    for value in vars(owner).values():
        for function in (value, *(getattr(value, name, None) for name in _WRAPPED)):
            if isinstance(function, FunctionType):
                yield function.__code__


_WRAPPED = ("__func__", "fget", "fset", "func", "__wrapped__")


def _kept_by_others(session: Session) -> Iterator[torch.Tensor]:
    yield from session.model.parameters()
    for state in session.optimizer.state.values():
        if isinstance(state, dict):
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
