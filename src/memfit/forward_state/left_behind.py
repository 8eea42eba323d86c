"""What one forward has left behind, to be held against what another one leaves."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from memfit.forward_state.kept_tensors import KeptTensors
from memfit.forward_state.state import Before
from memfit.live_state.containers import at
from memfit.live_state.findings import PLAIN_TYPES
from memfit.live_state.generators import access_to

_SEQUENCES = (list, tuple, deque)
_WITH_STORAGE = (torch.Tensor, torch.nn.Parameter)
_SMALL_BYTES = 4096
"""Tensors up to here are compared all at once, which takes copies of them."""


class Left:
    """Everything that a forward has changed, as it has left it; generators are no part of it.

    Args:
        before: what there was before it.
    """

    def __init__(self, before: Before) -> None:
        self._before = before
        self._holders = before.holders
        self._held = self._holders.held()
        tensors = {id(tensor): tensor for kept in before.kept for tensor in kept.tensors}
        self._kept = KeptTensors.of([*tensors.values()]) if tensors else None
        self._arrays = [(array, array.copy()) for array in self._held.arrays]

    def first_difference(self, besides: Collection[str] = ()) -> str | None:
        """Name what is otherwise now; None if nothing is.

        Args:
            besides: names that may be; what lies below them may be as well.
        """
        different = (name for name in self._differences() if not lies_in(name, besides))
        return next(different, None)

    def put_back(self) -> None:
        """Leave behind the same once more."""
        self._holders.put_back(self._held)
        if self._kept is not None:
            self._kept.put_back()
        for array, content in self._arrays:
            array[...] = content

    def _differences(self) -> Iterator[str]:
        now = self._holders.held()
        for group, old, new in self._holders.pairs(self._held, now):
            for target, place, was, is_now in zip(
                group.targets, group.places, old, new, strict=True
            ):
                was_named = dict(group.kind.named(target, was))
                now_named = dict(group.kind.named(target, is_now))
                if place.text.endswith("_hooks") and _are_like_hooks(was_named, now_named):
                    continue
                for name in {**was_named, **now_named}:
                    is_in_both = name in was_named and name in now_named
                    if not is_in_both or not _is_equal(was_named[name], now_named[name], {}):
                        yield at(group.kind, place, name).text
        yield from self._written_otherwise()
        for array, content in self._arrays:
            if array.shape != content.shape or array.tobytes() != content.tobytes():
                yield "a numpy array"

    def _written_otherwise(self) -> Iterator[str]:
        if self._kept is None:
            known: set[int] = set()
        else:
            known = {*map(id, self._kept.tensors)}
            pairs = [*zip(self._kept.tensors, self._kept.copies, strict=True)]
            small = [pair for pair in pairs if pair[0].nbytes <= _SMALL_BYTES]
            for group in (small, *([pair] for pair in pairs if pair[0].nbytes > _SMALL_BYTES)):
                if group and not _hold_the_same(group):
                    different = (one for one, other in group if not _hold_the_same([(one, other)]))
                    yield self._before.name_of(next(different))
        for tensor in self._before.written_tensors():
            if id(tensor) not in known:
                yield self._before.name_of(tensor)


def lies_in(name: str, places: Collection[str]) -> bool:
    """Test whether a name is one of some places, or lies below one (``model.kept`` and its [0])."""
    return any(name == each or name.startswith((f"{each}.", f"{each}[")) for each in places)


def _are_like_hooks(some: Mapping[Any, Any], others: Mapping[Any, Any]) -> bool:
    """Return whether modules have hooks of the same code; torch numbers them by a count of all."""
    return [*map(_code_of, some.values())] == [*map(_code_of, others.values())]


def _code_of(hook: Any) -> Any:
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    return type(hook) if code is None else code


def _is_equal(one: Any, other: Any, met: dict[tuple[int, int], bool]) -> bool:
    """Return whether two values are equal to the bit, whatever they hold."""
    if one is other or (id(one), id(other)) in met:
        return True
    met[id(one), id(other)] = True
    if type(one) is not type(other):
        return False
    if type(one) in PLAIN_TYPES:
        return repr(one) == repr(other)
    if isinstance(one, torch.Tensor):
        return _hold_the_same([(one, other)])
    if isinstance(one, np.ndarray):
        return bool(one.shape == other.shape and one.tobytes() == other.tobytes())
    if access_to(type(one)) is not None:
        return True
    return _parts_are_equal(one, other, met)


def _parts_are_equal(one: Any, other: Any, met: dict[tuple[int, int], bool]) -> bool:
    if isinstance(one, _SEQUENCES):
        return len(one) == len(other) and all(
            _is_equal(a, b, met) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, (dict, OrderedDict)):
        return [*one] == [*other] and all(_is_equal(one[key], other[key], met) for key in one)
    if isinstance(one, (set, frozenset)):
        return bool(one == other)
    parts, others = (getattr(each, "__dict__", None) for each in (one, other))
    if isinstance(parts, dict) and isinstance(others, dict) and not callable(one):
        return _is_equal(parts, others, met)
    return False


def _hold_the_same(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Compare tensors with others: shapes, types and bits, all bits of a device at once.

    Fake tensors hold nothing; the operators are the same ones for them.
    """
    for one, other in pairs:
        if one.shape != other.shape or one.dtype is not other.dtype or one.device != other.device:
            return False
        if _is_given_back(one) != _is_given_back(other):
            return False
    there = [pair for pair in pairs if not _is_given_back(pair[0])]
    for device in {one.device for one, _ in there}:
        chosen = [pair for pair in there if pair[0].device == device]
        one, other = (
            torch.cat(side) if len(side) > 1 else side[0]
            for side in ([_bits(tensor) for tensor in side] for side in zip(*chosen, strict=True))
        )
        same = torch.eq(one, other).all()
        if not isinstance(same, FakeTensor) and not bool(same):
            return False
    return True


def _is_given_back(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory was given back, as of weights that are gathered again.

    To read it would end the process.
    """
    if isinstance(tensor, FakeTensor) or type(tensor) not in _WITH_STORAGE:
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a tensor holds as one line of bytes."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)
