"""Follows the samples of a batch through a recorded step, operator by operator.

The step is recorded at two batch sizes. Both recordings have to be the same calls in the same
order: where they part, the code looks at the size of its batch. Rules then say of each call how its
results depend on the samples (see memfit.analysis.flow); what a rule says of the shapes of results
is checked against the shapes at both sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memfit.analysis.alignment import Alignment, culprit_of
from memfit.analysis.dataflow import Call, Dataflow, Ref, refs_in
from memfit.analysis.flow import Flow, Kind, Problem
from memfit.analysis.rules import rule_of
from memfit.analysis.separability import Culprit, NeverHolds
from memfit.analysis.splitting import split_alone
from memfit.analysis.use import (
    CoupledError,
    NotFollowedError,
    Sizes,
    Use,
    operator_name,
    written_arguments,
)
from memfit.trace.operators import draws

_SILENTLY_WRITTEN: Mapping[str, tuple[str, ...]] = {
    "native_batch_norm": ("running_mean", "running_var"),
    "cudnn_batch_norm": ("running_mean", "running_var"),
}
"""Arguments that operators write without saying so in their schemas."""


@dataclass(frozen=True, slots=True)
class Write:
    """A tensor that outlives the step, written by an operator."""

    number: int
    flow: Flow
    culprit: Culprit
    is_backward: bool


@dataclass(slots=True)
class Followed:
    """What is known of every tensor of a step."""

    flows: dict[int, Flow]
    writes: list[Write] = field(default_factory=list)
    conditions: dict[NeverHolds, None] = field(default_factory=dict)
    draws: bool = False
    """Whether random numbers are drawn in forward or backward."""
    coupled_modules: dict[str, Problem] = field(default_factory=dict)
    """Modules in whose own calls samples meet, or could not be followed."""


def follow(
    recordings: tuple[Dataflow, Dataflow],
    sizes: Sizes,
    known: Mapping[int, Flow | None],
    lasting: Mapping[int, str],
    *,
    given_statistics: bool = False,
) -> Followed:
    """Follow the samples through a step.

    Args:
        recordings: of the step at both sizes.
        sizes: the batch sizes.
        known: the tensors that both recordings begin with, by number, with what is known of them;
            None, and others that no operator has made, do not depend on the batch if their shapes
            do not.
        lasting: names of the tensors that outlive the step, by number.
        given_statistics: whether the statistics of batch normalisation are taken as given.

    Raises:
        RecordingsDifferError: if the recordings part.
    """
    return _Walk(recordings, sizes, known, lasting, given_statistics=given_statistics).run()


class _Walk:
    def __init__(
        self,
        recordings: tuple[Dataflow, Dataflow],
        sizes: Sizes,
        known: Mapping[int, Flow | None],
        lasting: Mapping[int, str],
        *,
        given_statistics: bool,
    ) -> None:
        self._first, self._second = recordings
        self._sizes = sizes
        self._lasting = _storages(self._first, lasting)
        self._given_statistics = given_statistics
        self._of_storage: dict[int, list[int]] = {}
        self._found = Followed(flows={})
        num_known = len(known)
        self._alignment = Alignment(
            self._first, self._second, num_known, (sizes.first, sizes.second)
        )
        for number in self._first.foreign[:num_known]:
            self._set(number, known[number] or self._foreign(number))

    def run(self) -> Followed:
        for call, other in self._alignment.pairs():
            self._meet_foreign(call)
            self._follow(call, other or call)
        return self._found

    def _meet_foreign(self, call: Call) -> None:
        """Say what is known of tensors that come from outside, when they are first met."""
        for ref in refs_in(call.arguments):
            if ref.number not in self._found.flows:
                self._set(ref.number, self._foreign(ref.number))

    def _flow_of(self, ref: Ref) -> Flow:
        return self._found.flows[ref.number]

    def _set(self, number: int, flow: Flow) -> None:
        self._found.flows[number] = flow
        self._of_storage.setdefault(self._first.shapes[number].storage, [])
        numbers = self._of_storage[self._first.shapes[number].storage]
        if number not in numbers:
            numbers.append(number)

    def _foreign(self, number: int) -> Flow:
        """Say what is known of a tensor that comes from outside the step."""
        counterpart = self._alignment.other_of[number]
        one, other = self._first.shapes[number], self._second.shapes[counterpart]
        num_dims = len(one.size)
        if one.size != other.size:
            culprit = Culprit(operator="a tensor made outside torch's operators")
            return _bad(Kind.UNKNOWN, "has a shape that follows the batch size", culprit, num_dims)
        values = self._first.values.get(number), self._second.values.get(counterpart)
        flow = Flow(kind=Kind.FREE, axes=(None,) * num_dims)
        return _with_values(flow, values)

    def _follow(self, call: Call, other: Call) -> None:
        use = Use((call, other), (self._first, self._second), self._flow_of, self._sizes)
        use.other_of = self._alignment.other_of
        use.given_statistics = self._given_statistics
        if _is_drawing(call):
            self._found.draws = True
        try:
            flows = self._results(use)
        except CoupledError as error:
            flows = self._bad(use, Kind.MIXED, str(error))
        except NotFollowedError as error:
            flows = self._bad(use, Kind.UNKNOWN, str(error))
        self._note_module(call, flows)
        for condition in use.relied_on:
            self._found.conditions[condition] = None
        self._keep(use, flows)

    def _results(self, use: Use) -> list[Flow]:
        flows = use.flows
        bad = next((flow for flow in flows if flow.is_bad), None)
        if bad is not None and use.name.removesuffix("_") not in {"zero", "fill", "ones_like",
                                                                  "zeros_like", "empty_like"}:  # fmt: skip
            mixed = next((flow for flow in flows if flow.kind is Kind.MIXED), bad)
            return [_like_bad(use, ref, mixed) for ref in use.call.results]
        if all(flow.kind is Kind.FREE and flow.is_plain for flow in flows):
            free = self._free_results(use)
            if free is not None:
                return free
        rule = rule_of(use.call.func)
        found = self._unruled(use) if rule is None else rule(use)
        return self._checked(use, found)

    def _free_results(self, use: Use) -> list[Flow] | None:
        """Say what comes of tensors that do not depend on the batch; None if that is not clear."""
        if _is_drawing(use.call) or not _same_numbers(use):
            return None
        pairs = [(use.size_of(ref), use.other_size_of(ref)) for ref in use.call.results]
        if any(one != other for one, other in pairs):
            return None
        found = []
        for ref in use.call.results:
            counterpart = self._alignment.other_of[ref.number]
            values = self._first.values.get(ref.number), self._second.values.get(counterpart)
            flow = Flow(kind=Kind.FREE, axes=(None,) * len(use.size_of(ref)))
            found.append(_with_values(flow, values))
        rule = rule_of(use.call.func)
        if use.name in {"zeros", "zeros_like", "new_zeros", "zero_"} and rule is not None:
            return rule(use)
        return found

    def _unruled(self, use: Use) -> list[Flow]:
        """Try an operator that has no rule on small tensors."""
        return split_alone(use)

    def _checked(self, use: Use, flows: Sequence[Flow]) -> list[Flow]:
        """Check what a rule says of shapes against both recordings.

        Raises:
            NotFollowedError: if it is not so.
        """
        results = use.call.results
        if len(flows) != len(results):
            raise NotFollowedError("gives another number of results than expected")
        for ref, flow in zip(results, flows, strict=True):
            if flow.is_bad or flow.is_opaque:
                continue
            size, other = use.size_of(ref), use.other_size_of(ref)
            if len(flow.axes) != len(size):
                raise NotFollowedError("gives another number of dimensions than expected")
            for axis, one, two in zip(flow.axes, size, other, strict=True):
                wanted = (
                    (one, one)
                    if axis is None
                    else (axis.extent(self._sizes.first), axis.extent(self._sizes.second))
                )
                if (one, two) != wanted:
                    raise NotFollowedError("gives a shape that was not expected")
        return list(flows)

    def _bad(self, use: Use, kind: Kind, sentence: str) -> list[Flow]:
        culprit = culprit_of(use.call)
        return [
            _bad(kind, sentence, culprit, len(use.size_of(ref))) for ref in use.call.results
        ] or [_bad(kind, sentence, culprit, 0)]

    def _note_module(self, call: Call, flows: Sequence[Flow]) -> None:
        problem = next((flow.problem for flow in flows if flow.problem is not None), None)
        if problem is not None:
            self._found.coupled_modules.setdefault(call.place.module, problem)

    def _keep(self, use: Use, flows: Sequence[Flow]) -> None:
        """Note results, and what was written in place."""
        written = list(_written(use))
        before = {ref.number: self._found.flows[ref.number] for ref in written}
        for ref, flow in zip(use.call.results, flows, strict=False):
            self._set(ref.number, flow)
        for place, ref in enumerate(written):
            flow = flows[min(place, len(flows) - 1)] if flows else Flow(kind=Kind.UNKNOWN)
            if flow.axes and len(flow.axes) != len(use.size_of(ref)):
                flow = self._bad(use, Kind.UNKNOWN, "writes in another shape")[0]
            self._set(ref.number, flow)
            self._spread(use, ref, before[ref.number], flow)
            self._note_write(use, ref, flow)

    def _note_write(self, use: Use, ref: Ref, flow: Flow) -> None:
        if self._first.shapes[ref.number].storage in self._lasting:
            write = Write(ref.number, flow, culprit_of(use.call), use.call.is_backward)
            self._found.writes.append(write)

    def _spread(self, use: Use, ref: Ref, before: Flow, after: Flow) -> None:
        """Say of other views of the same memory what was written there."""
        written = self._first.shapes[ref.number]
        is_like = before.kind is after.kind and before.axes == after.axes
        is_like = is_like and abs(before.ratio - after.ratio) < 1e-12
        for number in self._of_storage[written.storage]:
            if number == ref.number:
                continue
            flow, shape = self._found.flows[number], self._first.shapes[number]
            if flow.is_bad:
                continue
            if after.is_bad:
                self._found.flows[number] = replace(after, axes=(None,) * len(shape.size))
            elif is_like or _is_compatible(flow, after):
                self._found.flows[number] = _written_to(flow, after)
            elif shape.numel == written.numel and shape.size == written.size:
                self._found.flows[number] = after
            else:
                sentence = "writes samples into memory that is seen in other ways as well"
                culprit = culprit_of(use.call)
                kind = Kind.MIXED if flow.kind is Kind.FREE else Kind.UNKNOWN
                self._found.flows[number] = _bad(kind, sentence, culprit, len(shape.size))


def _written_to(flow: Flow, after: Flow) -> Flow:
    return replace(
        flow,
        is_uniform=flow.is_uniform and after.is_uniform and flow.value == after.value,
        value=flow.value if flow.value == after.value else None,
        is_drawn=flow.is_drawn or after.is_drawn,
        sources=None,
    )


def _is_compatible(flow: Flow, after: Flow) -> bool:
    """Say whether a view keeps what is known of it when another view of its memory is written."""
    if flow.kind is not after.kind or abs(flow.ratio - after.ratio) > 1e-12:
        return False
    if flow.kind is not Kind.EACH:
        return True
    mine, its = [a for a in flow.axes if a], [a for a in after.axes if a]
    return len(mine) == len(its) == 1 and mine[0].matches(its[0])


def _storages(recording: Dataflow, lasting: Mapping[int, str]) -> dict[int, str]:
    return {recording.shapes[number].storage: name for number, name in lasting.items()}


def _written(use: Use) -> list[Ref]:
    found = [use.call.arguments[place] for place in written_arguments(use.call.func)]
    if not use.given_statistics:
        names = _SILENTLY_WRITTEN.get(operator_name(use.call.func), ())
        if names and use.argument("training"):
            found += [use.argument(name) for name in names]
    refs = []
    for each in found:
        if isinstance(each, Ref):
            refs.append(each)
        elif isinstance(each, tuple):
            refs += [ref for ref in each if isinstance(ref, Ref)]
    return refs


def _with_values(flow: Flow, values: tuple[Any, Any]) -> Flow:
    """Compare the numbers that a tensor holds at both sizes."""
    first, second = values
    if first is None or second is None or first == second:
        is_whole = first is not None and first == second and len(set(first)) == 1
        if is_whole and first is not None:
            return replace(flow, value=first[0], is_uniform=True)
        return flow
    if len(first) == len(second) == 1 and first[0] and second[0]:
        return replace(flow, ratio=second[0] / first[0])
    culprit = Culprit(operator="a tensor of numbers")
    return _bad(Kind.MIXED, "holds numbers that depend on the batch size", culprit, len(flow.axes))


def _bad(kind: Kind, sentence: str, culprit: Culprit, num_dims: int) -> Flow:
    problem = Problem(sentence=sentence, culprit=culprit)
    return Flow(kind=kind, axes=(None,) * num_dims, problem=problem)


def _like_bad(use: Use, ref: Ref, bad: Flow) -> Flow:
    return replace(bad, axes=(None,) * len(use.size_of(ref)))


def _is_drawing(call: Call) -> bool:
    return draws(call.func, call.arguments, {})


def _same_numbers(use: Use) -> bool:
    return all(
        one == other or isinstance(one, Ref)
        for one, other in zip(use.call.arguments, use.other.arguments, strict=True)
    )
