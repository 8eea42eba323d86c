"""What a forward can change besides its results: kept before it runs, put back to run it again."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import attrgetter
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memfit.errors import StrategyError
from memfit.forward_state.holders import Held, Holders
from memfit.forward_state.kept_tensors import KeptTensors, Memories
from memfit.forward_state.random_draws import RandomPositions
from memfit.forward_state.written_tensors import WrittenTensors
from memfit.live_state.findings import Obstacle
from memfit.live_state.snapshot import undisturbed
from memfit.units import MIB, format_bytes

_ALWAYS_COPIED_BYTES = 64 * 1024
"""Of one tensor that is no parameter: what is small is copied whether it changes or not."""
_MOST_BYTES = 64 * MIB
_GONE_FOR_GOOD = frozenset(("file", "iterator", "socket", "queue", "process", "context variable"))
"""Kinds of things that a second run would meet in another state than the first."""
_LEARNT: ContextVar[list[str]] = ContextVar("learnt")
"""The strategies whose forwards have taught them something; see ``learning_noted``."""
_version = attrgetter("_version")
_without_functions = torch._C.DisableTorchFunction


def not_repeatable(obstacles: Iterable[Obstacle]) -> str | None:
    """Return what a second run would not find as the first did; None if there is no such thing."""
    return next((str(each) for each in obstacles if each.kind in _GONE_FOR_GOOD), None)


@contextmanager
def learning_noted() -> Iterator[list[str]]:
    """Note what forwards inside are seen to change, so that later ones begin otherwise."""
    learnt: list[str] = []
    token = _LEARNT.set(learnt)
    try:
        yield learnt
    finally:
        _LEARNT.reset(token)


def tensors_held() -> frozenset[int]:
    """List, by id, all tensors that may be bound again when a forward is run once more.

    Looks through all objects of Python, which takes tens of milliseconds.
    """
    befores = (each for each in gc.get_objects() if type(each) is Before)
    return frozenset(id(tensor) for before in befores for tensor in before.tensors())


class Before:
    """What there was before a forward; made by ``ForwardState.before``."""

    __slots__ = (
        "_arrays",
        "held",
        "holders",
        "kept",
        "positions",
        "unkept",
        "versions",
        "written",
    )

    def __init__(
        self,
        holders: Holders,
        held: Held,
        copied: Sequence[torch.Tensor],
        unkept: Sequence[torch.Tensor],
    ) -> None:
        self.holders = holders
        self.held = held
        self.unkept = unkept
        """Tensors whose content was not copied; ``versions`` are theirs."""
        self.kept = [KeptTensors.of(copied)] if copied else []
        self.versions = [*map(_version, unkept)]
        self.written: list[torch.Tensor] = []
        """Tensors that operators were seen to write to."""
        self._arrays = [(array, array.copy()) for array in held.arrays]
        self.positions = RandomPositions(held.generators)

    @property
    def num_bytes(self) -> int:
        """Add up the bytes of tensors and arrays that are kept."""
        tensors = (tensor for kept in self.kept for tensor in kept.tensors)
        return sum(each.nbytes for each in (*tensors, *(array for array, _ in self._arrays)))

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors that the code could reach."""
        yield from self.held.tensors
        yield from (tensor for kept in self.kept for tensor in kept.tensors)

    def first_change(self) -> str | None:
        """Name what is otherwise now; None if nothing is known to be."""
        for change in self.holders.changes(self.held):
            return str(change)
        if written := self.written_tensors():
            return self.name_of(written[0])
        for array, content in self._arrays:
            if array.shape != content.shape or array.tobytes() != content.tobytes():
                return "a numpy array"
        return self.positions.first_moved()

    def written_tensors(self) -> list[torch.Tensor]:
        """List the tensors that are known to have been written to."""
        return [*self.written, *(tensor for kept in self.kept for tensor in kept.changed())]

    def name_of(self, tensor: torch.Tensor) -> str:
        """Name a tensor by where it was found."""
        places = (place for each, place in self.held.named_tensors() if each is tensor)
        return next((place.text for place in places), "a tensor")

    def put_back(self) -> None:
        """Put everything back for good, but for random generators."""
        with _without_functions():
            self.holders.put_back(self.held)
            for kept in self.kept:
                kept.put_back()
            for array, content in self._arrays:
                array[...] = content

    def with_generators_here(self) -> Before:
        """Return the same, with random generators where they are now; what is learnt is shared."""
        twin = copy.copy(self)
        twin.positions = RandomPositions(self.held.generators)
        return twin

    def shown(self) -> Shown:
        """Return a context, to be entered as often as wanted, in which everything is as it was."""
        return Shown(self)


class Shown:
    """Put back what there was before a forward, for a while; afterwards what there was meanwhile.

    What tensors hold is neither overwritten nor copied for that: they are moved to other memory.
    """

    __slots__ = ("_before", "_now")

    def __init__(self, before: Before) -> None:
        self._before = before
        self._now: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        before = self._before
        with _without_functions():
            held = before.holders.held()
            arrays = [(array, array.copy()) for array in held.arrays]
            memories = [Memories.of(kept.tensors) for kept in before.kept]
            self._now = (held, memories, arrays, RandomPositions(held.generators))
            before.holders.put_back(before.held, held)
            for kept in before.kept:
                kept.show()
            for array, content in before._arrays:
                array[...] = content
            before.positions.put_back()

    def __exit__(self, *exc_info: object) -> None:
        held, memories, arrays, positions = self._now
        self._now = ()
        with _without_functions():
            self._before.holders.put_back(held)
            for each in memories:
                each.put_back()
            for array, content in arrays:
                array[...] = content
            positions.put_back()


class ForwardState:
    """Watch what some code can reach and change.

    Parameters, and tensors of more than 64 KiB, are copied before a forward once they have been
    seen to change in one. Which ones do is watched, operator by operator, in the first two
    forwards, and then in the fourth, the eighth and so on; in the others a change shows in the
    tensor's version.

    Args:
        roots: where the code's objects are found, by name.
        strategy: on whose behalf, for errors.

    Limits: a large tensor that first changes after the second forward is an error by name in that
    forward, and copied from then on; if it changes through ``.data``, autograd is not told, and
    the change is seen only in the next forward that is watched. Memory that other libraries write
    to is not seen, apart from numpy arrays.
    """

    def __init__(self, roots: Mapping[str, object], strategy: str) -> None:
        with undisturbed():
            self._holders = Holders(roots)
        self._roots = roots
        self._strategy = strategy
        self._written: set[int] = set()
        """Large tensors that forwards have been seen to change, by id."""
        self._num_forwards = 0
        self._usual = self._split(self._holders.tensors)

    @property
    def obstacle(self) -> str | None:
        """Return what the code reaches that cannot be put back; None if there is no such thing."""
        return not_repeatable(self._holders.obstacles)

    def expect(self, value: Any) -> None:
        """Take what the strategy itself puts among the code's objects for no change of theirs."""
        self._holders.expect(value)

    def before(self, *arguments: Any) -> Before:
        """Keep what there is before a forward with these arguments."""
        if self._holders.has_new_hooks:
            with undisturbed():
                self._holders = Holders(self._roots)
            self._usual = self._split(self._holders.tensors)
        with _without_functions():
            held = self._holders.held(arguments)
            is_usual = held.tensors is self._holders.tensors
            copied, unkept = self._usual if is_usual else self._split(held.tensors)
            return Before(self._holders, held, copied, unkept)

    def run(self, before: Before, forward: Callable[[], Any]) -> Any:
        """Run a forward, and learn from it what has to be copied before the next.

        Raises:
            StrategyError: if something has changed that cannot be put back.
        """
        self._num_forwards = number = self._num_forwards + 1
        if not number & (number - 1):  # one, two, and higher powers of two
            writes = self._writes(before)
            try:
                with writes:
                    result = forward()
            finally:  # a forward may be ended half way on purpose
                self._learn(before, writes)
        else:
            result = forward()
        if before.versions != [*map(_version, before.unkept)]:
            self._check(before)
        return result

    def _writes(self, before: Before) -> WrittenTensors:
        copied = [tensor for kept in before.kept for tensor in kept.tensors]
        known = {*map(id, copied)}
        return WrittenTensors(
            [
                tensor
                for tensor in before.unkept
                if tensor.is_leaf and _has_memory(tensor) and id(tensor) not in known
            ],
            copied,
        )

    def _learn(self, before: Before, writes: WrittenTensors) -> None:
        """Copy from now on what a forward has written to.

        Raises:
            StrategyError: if it is too much.
        """
        kept = writes.kept()
        before.written += writes.written
        if not kept:
            return
        before.kept += kept
        if (learnt := _LEARNT.get(None)) is not None:
            learnt.append(self._strategy)
        self._written.update(id(tensor) for each in kept for tensor in each.tensors)
        self._usual = self._split(self._holders.tensors)
        if before.num_bytes <= _MOST_BYTES:
            return
        tensors = [tensor for each in before.kept for tensor in each.tensors]
        largest = max(tensors, key=lambda tensor: tensor.nbytes)
        reason = (
            f"the forward changes {format_bytes(before.num_bytes)} of tensors, the largest being "
            f"{before.name_of(largest)}; no more than {format_bytes(_MOST_BYTES)} are "
            "copied to be put back."
        )
        raise StrategyError(self._strategy, reason)

    def _check(self, before: Before) -> None:
        """See whether what has changed was copied.

        Raises:
            StrategyError: if it was not.
        """
        copied = {id(tensor) for kept in before.kept for tensor in kept.tensors}
        for tensor, version in zip(before.unkept, before.versions, strict=True):
            if tensor._version == version or id(tensor) in copied:
                continue
            name = before.name_of(tensor)
            if not (tensor.is_leaf and _has_memory(tensor)):
                reason = (
                    f"the forward changes {name} in place as a part of the graph, so it cannot be "
                    "run again. Give it a new value instead: x = x + y, not x += y."
                )
                raise StrategyError(self._strategy, reason)
            self._written.add(id(tensor))
            self._usual = self._split(self._holders.tensors)
            reason = (
                f"the forward has changed {name} in place for the first time, and what it held "
                "before is not known. Carry the step out again: from now on it is copied before."
            )
            raise StrategyError(self._strategy, reason)

    def _split(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Part tensors that are copied before each forward from those that are watched."""
        copied: list[torch.Tensor] = []
        watched: list[torch.Tensor] = []
        for tensor in tensors:
            if tensor.is_inference():
                continue  # never changed, and without a version
            is_wanted = id(tensor) in self._written or (
                tensor.nbytes <= _ALWAYS_COPIED_BYTES and not isinstance(tensor, torch.nn.Parameter)
            )
            can_be = tensor.is_leaf and _has_memory(tensor)
            (copied if is_wanted and can_be else watched).append(tensor)
        return copied, watched


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
