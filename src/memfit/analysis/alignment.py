"""Lays two recordings of the same code side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from memfit.analysis.dataflow import Call, Dataflow, Ref
from memfit.analysis.separability import Culprit
from memfit.analysis.use import argument_names, operator_name
from memfit.trace.operators import written_arguments

_COPIES = frozenset({"clone", "contiguous", "_lazy_clone", "_to_copy"})
"""What is put in where the layout of a tensor asks for it, or a hook keeps what is large: sizes
decide that, values do not."""
_RESHAPES = frozenset({"view", "_unsafe_view", "_reshape_alias", "reshape"})


class RecordingsDifferError(Exception):
    """Say where a step does something else at another batch size."""

    def __init__(self, call: Call) -> None:
        self.culprit = culprit_of(call)
        super().__init__(self.culprit)


def culprit_of(call: Call) -> Culprit:
    """Name the operator of a call and its place."""
    return Culprit(
        operator=operator_name(call.func).strip("_"),
        source_line=call.place.source_line,
        module=call.place.module,
    )


class Alignment:
    """Pair the calls of two recordings, and their tensors.

    Args:
        first: one recording.
        second: the other; both begin with the same foreign tensors.
        num_known: how many foreign tensors at the beginning belong together.
        sizes: the batch sizes of both.
    """

    def __init__(
        self, first: Dataflow, second: Dataflow, num_known: int, sizes: tuple[int, int]
    ) -> None:
        self._first, self._second = first, second
        self._sizes = sizes
        self.other_of: dict[int, int] = {}
        """The second recording's tensor for each of the first one's."""
        self._canon: dict[int, int] = {}
        self._other_canon: dict[int, frozenset[int]] = {}
        """Several for one tensor: a column of one sample is its own transpose."""
        self._copied: set[int] = set()
        for one, other in zip(first.foreign[:num_known], second.foreign[:num_known], strict=True):
            self._pair(one, other)

    def pairs(self) -> Iterator[tuple[Call, Call | None]]:
        """Yield the calls of the first recording, each with its like in the second.

        A copy that only the first one makes comes alone; one of the second is passed over.

        Raises:
            RecordingsDifferError: if the recordings part.
        """
        calls, others = self._first.calls, self._second.calls
        here = there = 0
        while here < len(calls) or there < len(others):
            call = calls[here] if here < len(calls) else None
            other = others[there] if there < len(others) else None
            if call is not None and other is not None and self._match(call, other):
                self._pair_results(call, other)
                here, there = here + 1, there + 1
                yield call, other
            elif call is not None and (like := self._sum_over_one(call)) is not None:
                here += 1
                yield call, like
            elif call is not None and (_is_copy(call, self._first) or self._repeats_nothing(call)):
                self._follow_copy(call)
                source = call.arguments[0].number
                self.other_of[call.results[0].number] = self.other_of[source]
                here += 1
                yield call, None
            elif other is not None and _is_copy(other, self._second):
                sources = self._other_canon[other.arguments[0].number]
                self._other_canon[other.results[0].number] = sources
                self._copied |= sources
                there += 1
            else:
                culprit = call or other
                assert culprit is not None, "one of the recordings goes on"
                raise RecordingsDifferError(culprit)

    def _sum_over_one(self, call: Call) -> Call | None:
        """Return the second recording's sum over one element, where torch has left it out.

        The gradient of what is broadcast is added up over the samples, unless there is one alone.
        """
        names = argument_names(call.func)
        source = call.arguments[0] if operator_name(call.func) == "sum" else None
        dims = call.arguments[names["dim"]] if source is not None and "dim" in names else None
        if not isinstance(source, Ref) or not dims or not call.arguments[names["keepdim"]]:
            return None
        number = self.other_of.get(source.number)
        if number is None or any(self._second.shapes[number].sizes[dim] != 1 for dim in dims):
            return None
        self._follow_copy(call)
        self.other_of[call.results[0].number] = number
        arguments = (Ref(number), *call.arguments[1:])
        return replace(call, arguments=arguments, results=(Ref(number),))

    def _pair(self, one: int, other: int) -> None:
        self._canon[one] = one
        self._other_canon[other] = self._other_canon.get(other, frozenset()) | {one}
        self.other_of[one] = other

    def _pair_results(self, call: Call, other: Call) -> None:
        for place in written_arguments(call.func):
            written = call.arguments[place]
            if isinstance(written, Ref) and self._canon[written.number] in self._copied:
                raise RecordingsDifferError(call)
        for one, two in zip(call.results, other.results, strict=True):
            known = self._canon.get(one.number)
            if known is None or known not in self._other_canon.get(two.number, ()):
                self._pair(one.number, two.number)

    def _follow_copy(self, call: Call) -> None:
        source = self._canon[call.arguments[0].number]
        self._canon[call.results[0].number] = source
        self._copied.add(source)

    def _repeats_nothing(self, call: Call) -> bool:
        """Return whether a call would leave its tensor as it is at the second size.

        Code for whole batches may leave it out for a batch of one: ``x.expand(len(batch), -1)``.
        """
        if operator_name(call.func) != "expand":
            return False
        source, result = call.arguments[0].number, call.results[0].number
        if source not in self.other_of:
            return False
        wanted = self._first.shapes[result].sizes
        here = self._first.shapes[source].sizes
        there = self._second.shapes[self.other_of[source]].sizes
        return here == there and len(here) == len(wanted) and self._sizes_of_one(here, wanted)

    def _sizes_of_one(self, here: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
        """Return whether a tensor is repeated once for each sample, and the second size is one."""
        first, second = self._sizes
        return second == 1 and all(
            one == two or (one == 1 and two == first) for one, two in zip(here, wanted, strict=True)
        )

    def _match(self, call: Call, other: Call) -> bool:
        """Return whether two calls are the same but for numbers, and pair their new tensors."""
        if not _same_operator(call, other) or call.role is not other.role:
            return False
        if len(call.results) != len(other.results):
            return False
        return len(call.arguments) == len(other.arguments) and all(
            map(self._same, call.arguments, other.arguments)
        )

    def _same(self, one: Any, other: Any) -> bool:
        if isinstance(one, Ref) and isinstance(other, Ref):
            return self._same_tensor(one.number, other.number)
        if isinstance(one, tuple) and isinstance(other, tuple):
            if one and other and all(type(each) is int for each in (*one, *other)):
                return True  # sizes; the operators' rules look at them
            return len(one) == len(other) and all(map(self._same, one, other))
        if isinstance(one, bool) or isinstance(other, bool):
            return one is other
        if isinstance(one, torch.Generator) and isinstance(other, torch.Generator):
            return True  # each recording has its own
        if isinstance(one, (int, float)) and isinstance(other, (int, float)):
            return True
        return type(one) is type(other) and (one is other or str(one) == str(other))

    def _same_tensor(self, one: int, other: int) -> bool:
        if one not in self._canon and other not in self._other_canon:
            self._pair(one, other)
        return self._canon.get(one) in self._other_canon.get(other, ())


def is_same_program(
    recordings: tuple[Dataflow, Dataflow], names: tuple[Mapping[int, str], Mapping[int, str]]
) -> bool:
    """Return whether two recordings are the same calls with the same numbers, of the same tensors.

    Args:
        recordings: of a step at one batch size.
        names: of the tensors that outlive it, by number.
    """
    one, other = recordings
    pairs: dict[int, int] = {}

    def same(left: Any, right: Any) -> bool:
        if isinstance(left, Ref) and isinstance(right, Ref):
            first, second = left.number, right.number
            if first in pairs:
                return pairs[first] == second
            pairs[first] = second
            return names[0].get(first) == names[1].get(second) and _is_alike(
                recordings, (first, second)
            )
        if isinstance(left, tuple) and isinstance(right, tuple):
            return len(left) == len(right) and all(map(same, left, right))
        if isinstance(left, torch.Generator) and isinstance(right, torch.Generator):
            return True  # each recording has its own
        return type(left) is type(right) and repr(left) == repr(right)

    return len(one.calls) == len(other.calls) and all(
        call.func is its.func
        and same(call.arguments, its.arguments)
        and same(call.results, its.results)
        for call, its in zip(one.calls, other.calls, strict=True)
    )


def _is_alike(recordings: tuple[Dataflow, Dataflow], numbers: tuple[int, int]) -> bool:
    """Return whether two tensors have the same shape, and hold the same as far as is known."""
    one, other = (
        (each.shapes[number].sizes, each.shapes[number].dtype, each.values.get(number),
         each.digests.get(number))
        for each, number in zip(recordings, numbers, strict=True)
    )  # fmt: skip
    return repr(one) == repr(other)


def _is_copy(call: Call, recording: Dataflow) -> bool:
    """Return whether a call gives the numbers that it is given, in the same dtype."""
    if operator_name(call.func) not in _COPIES:
        return False
    source, result = call.arguments[0].number, call.results[0].number
    return recording.shapes[source].dtype is recording.shapes[result].dtype


def _same_operator(call: Call, other: Call) -> bool:
    if call.func is other.func:
        return True
    names = {operator_name(call.func), operator_name(other.func)}
    return names <= _RESHAPES
