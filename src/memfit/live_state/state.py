"""What a job's code can reach and change: found, kept, put back, compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from memfit.live_state.containers import CLASS, Kind
from memfit.live_state.findings import Obstacle
from memfit.live_state.ownership import package_of
from memfit.live_state.random_sources import RandomSourcesReader
from memfit.live_state.reach import Found, Scope
from memfit.live_state.snapshot import Part, Snapshot, Values, undisturbed
from memfit.live_state.tensor_watch import MOST_BYTES, TensorWatch
from memfit.live_state.tensors import Copied
from memfit.live_state.walk import walk, walk_behind, walk_on
from memfit.live_state.watch import Slot, Watch


class LiveState:
    """What a job's code can reach and change: found once, looked at again cheaply.

    Args:
        roots: where the walk begins, by name: the model, the optimizer, the job's functions.
        leave_out: tensors and arrays whose content the caller keeps himself: what they are bound
            to is watched, their content is not copied.
        gradients: whether ``.grad`` of tensors belongs to the state.
        most_bytes: how much content of tensors is copied at most. The largest are left out beyond
            that, and said to be obstacles.
        copies_content: whether the content of tensors and of large arrays is copied at all.
        copied: copies the content of tensors.
        beside: functions whose packages are the user's too, as those of the roots are.
    """

    def __init__(
        self,
        roots: Mapping[str, object],
        *,
        leave_out: Iterable[Any] = (),
        gradients: bool = False,
        most_bytes: int = MOST_BYTES,
        copies_content: bool = True,
        copied: Copied = torch.cat,
        beside: Iterable[object] = (),
    ) -> None:
        self._roots = dict(roots)
        self.own_packages = _packages_of([*self._roots.values(), *beside])
        """Which are the user's, wherever they are installed."""
        self._scope = replace(
            Scope.of(leave_out), own_packages=self.own_packages, copies_content=copies_content
        )
        self._met_behind: dict[int, Any] = {}
        self._random = RandomSourcesReader()
        self._watched = partial(
            TensorWatch, with_grad=gradients, most_bytes=most_bytes, copied=copied
        )
        self._volatile: dict[tuple[Kind, int], frozenset[Any] | None] = {}
        self._came: Counter[Slot] = Counter()
        self.num_walks = 0
        """How often everything was walked; where it stays, the same objects are held as before."""
        with undisturbed():
            self._walk()

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave out the content of these tensors from now on, and of no others."""
        self._scope = replace(Scope.of(tensors), own_packages=self.own_packages)
        with undisturbed():
            self._walk()

    def copied_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """List the tensors whose content is copied, with their places."""
        tensors = [each for found in self.found() for each in found.tensors]
        return [(place.text, tensor) for tensor, place, is_copied in tensors if is_copied]

    def code(self) -> Iterator[CodeType]:
        """Yield the code of the user's functions and classes that can be reached."""
        for found in self.found():
            yield from (function.__code__ for function in found.functions)
            classes = found.groups.get(CLASS)
            for owner in classes.targets if classes is not None else ():
                yield from _code_of_class(owner)

    @property
    def obstacles(self) -> tuple[Obstacle, ...]:
        """Return what cannot be put back."""
        return tuple(dict.fromkeys((*self._found.obstacles, *self._tensor_watch.obstacles)))

    def found(self) -> Sequence[Found]:
        """Return all that can be reached now: what stays, and what is found anew every time."""
        with undisturbed():
            self._look()
            return self._found, walk_on(self._scope, self._found)

    def snapshot(self) -> Snapshot:
        """Keep everything as it is now.

        Walks again only where something holds other objects than before. What does so again and
        again, such as a hidden state or a queue of features, is walked anew every time.
        """
        with undisturbed():
            self._look()
            parts = [_part(self._watch, self._tensor_watch, self._found)]
            if self._found.postponed:
                parts.append(self._part_of(walk_on(self._scope, self._found)))
            return Snapshot(parts, self._random.here(), self._random)

    def snapshot_behind(self, made: object, modules: Iterable[ModuleType] = ()) -> Snapshot:
        """Keep what lies behind an object and has not been met: what its code can change.

        Args:
            made: by the job's functions; what it holds itself is not kept.
            modules: that code has asked for, all of whose globals are kept.
        """
        with undisturbed():
            met = self._found.seen | self._met_behind
            found = walk_behind(self._scope, made, modules, met)
            self._met_behind |= found.seen
            return Snapshot([self._part_of(found)], self._random.here(), self._random)

    def _part_of(self, found: Found) -> Part:
        return _part(Watch(found, {}), self._watched(found.tensors), found)

    def _walk(self) -> None:
        self.num_walks += 1
        self._found = walk(self._scope, self._roots, self._volatile)
        self._watch = Watch(self._found, self._volatile)
        self._tensor_watch = self._watched(self._found.tensors)

    def _look(self) -> None:
        """Look at the containers, and walk again if they hold other objects."""
        changed = self._watch.look()
        if changed is None and not self._tensor_watch.has_new_hooks():
            return
        for slot in changed or ():
            self._came[slot] += 1
            (container, name) = slot
            by_name = name is not None and self._volatile.get(container, frozenset()) is not None
            if self._came[slot] >= _OFTEN:
                known = self._volatile.get(container) or frozenset()
                self._volatile[container] = known | {name} if by_name else None
        self._walk()


_OFTEN = 2
"""How often a name has to mean another object until it is expected to do so in every step."""


def _packages_of(code: Iterable[object]) -> frozenset[str]:
    """Name the packages that functions come from: they are the user's."""
    functions = (value for value in code if isinstance(value, FunctionType))
    return frozenset(package_of(function.__module__ or "") for function in functions)


def _code_of_class(owner: type) -> Iterator[CodeType]:
    for value in vars(owner).values():
        for function in (value, *(getattr(value, name, None) for name in _WRAPPED)):
            if isinstance(function, FunctionType):
                yield function.__code__


_WRAPPED = ("__func__", "fget", "fset", "func", "__wrapped__")


def _part(watch: Watch, tensors: TensorWatch, found: Found) -> Part:
    """Keep a part of the state as it is."""
    return Part(
        watch=watch,
        copies=watch.copies,
        places=tensors.places,
        tensors=tensors.look(),
        values=Values.of(found),
    )
