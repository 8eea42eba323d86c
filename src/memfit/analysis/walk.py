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
from memfit.analysis.dataflow import Call, Contents, Dataflow, Ref, refs_in
from memfit.analysis.flow import Flow, Kind, Problem
from memfit.analysis.memory import (
    is_apart,
    is_compatible,
    lies_like,
    samples_lie_alike,
    stays_like,
    written_refs,
    written_to,
)
from memfit.analysis.precautions import (
    carried_back,
    check_after,
    check_before,
    check_random,
    differing_numbers,
    is_backward,
)
from memfit.analysis.rules import rule_of
from memfit.analysis.rules.layers import check_statistics_of
from memfit.analysis.rules.loops import ROLES, of_one_sample
from memfit.analysis.separability import Culprit, NeverHolds
from memfit.analysis.signs import with_sign
from memfit.analysis.splitting import split_alone
from memfit.analysis.use import (
    NOTHING_GIVEN,
    CoupledError,
    Given,
    NotFollowedError,
    Sizes,
    Use,
)
from memfit.trace.operators import draws

_LOOKS_AT_NO_VALUE = frozenset({
    "zero", "fill", "ones_like", "zeros_like", "empty_like", "full_like", "new_zeros", "new_ones",
    "new_empty", "new_empty_strided", "new_full",
})  # fmt: skip
_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros", "zero_", "zero"})


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
    tried: dict[str, None] = field(default_factory=dict)
    """Operators without a rule, which were tried on examples alone."""
    coupled_modules: dict[str, Problem] = field(default_factory=dict)
    """Modules in whose own calls samples meet, or could not be followed."""


def follow(
    recordings: tuple[Dataflow, Dataflow],
    sizes: Sizes,
    known: Mapping[int, Flow | None],
    lasting: Mapping[int, str],
    *,
    given: Given = NOTHING_GIVEN,
) -> Followed:
    """Follow the samples through a step.

    Args:
        recordings: of the step at both sizes.
        sizes: the batch sizes.
        known: the tensors that both recordings begin with, by number, with what is known of them;
            None, and others that no operator has made, do not depend on the batch if their shapes
            do not.
        lasting: names of the tensors that outlive the step, by number.
        given: what is taken for granted.

    Raises:
        RecordingsDifferError: if the recordings part.
    """
    return _Walk(recordings, sizes, known, lasting, given=given).run()


class _Walk:
    def __init__(
        self,
        recordings: tuple[Dataflow, Dataflow],
        sizes: Sizes,
        known: Mapping[int, Flow | None],
        lasting: Mapping[int, str],
        *,
        given: Given,
    ) -> None:
        self._first, self._second = recordings
        self._sizes = sizes
        self._lasting = _storages(self._first, lasting)
        self._given = given
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
                self._set(ref.number, self._foreign(ref.number, call))
                storage = self._first.shapes[ref.number].storage
                self._lasting.setdefault(storage, "a tensor made before the step")

    def _flow_of(self, ref: Ref) -> Flow:
        return self._found.flows[ref.number]

    def _set(self, number: int, flow: Flow) -> None:
        self._found.flows[number] = flow
        self._of_storage.setdefault(self._first.shapes[number].storage, [])
        numbers = self._of_storage[self._first.shapes[number].storage]
        if number not in numbers:
            numbers.append(number)

    def _foreign(self, number: int, call: Call | None = None) -> Flow:
        """Get what is known of a tensor that comes from outside and that ``call`` reads first."""
        counterpart = self._alignment.other_of[number]
        one, other = self._first.shapes[number], self._second.shapes[counterpart]
        num_dims = len(one.sizes)
        if one.sizes != other.sizes:
            culprit = culprit_of(call) if call is not None else Culprit(operator="the step")
            sentence = (
                "reads a tensor made outside torch's operators, whose shape follows the batch size"
            )
            return _bad(Kind.UNKNOWN, sentence, culprit, num_dims)
        flow = Flow(kind=Kind.FREE, axes=(None,) * num_dims)
        return self._with_values(flow, number, counterpart)

    def _with_values(self, flow: Flow, number: int, counterpart: int) -> Flow:
        """Compare the numbers that a tensor holds at both sizes, where they are known."""
        one, other = self._known(number, counterpart)
        if isinstance(one, bytes) or isinstance(other, bytes):
            return flow if one == other else _differing(flow)
        return _with_values(flow, (one, other))

    def _known(self, number: int, counterpart: int) -> tuple[Contents | None, Contents | None]:
        """Return what is known of a tensor's numbers at both sizes."""
        one, other = self._first, self._second
        return (
            one.digests.get(number) or one.values.get(number),
            other.digests.get(counterpart) or other.values.get(counterpart),
        )

    def _follow(self, call: Call, other: Call) -> None:
        use = Use((call, other), (self._first, self._second), self._flow_of, self._sizes)
        use.other_of = self._alignment.other_of
        use.given = self._given
        if _is_drawing(call):
            self._found.draws = True
        try:
            flows = self._results(use)
        except CoupledError as error:
            flows = self._bad(use, Kind.MIXED, str(error))
        except NotFollowedError as error:
            flows = self._bad(use, Kind.UNKNOWN, str(error))
        pairs = zip(call.results, flows, strict=False)
        flows = [with_sign(use, ref, flow) for ref, flow in pairs] or flows
        self._note_module(call, flows)
        for condition in use.relied_on:
            self._found.conditions[condition] = None
        self._keep(use, flows)

    def _results(self, use: Use) -> list[Flow]:
        flows = use.flows
        bad = next((flow for flow in flows if flow.is_bad), None)
        if bad is not None and use.name.removesuffix("_") not in _LOOKS_AT_NO_VALUE:
            mixed = next((flow for flow in flows if flow.kind is Kind.MIXED), bad)
            return [_like_bad(use, ref, mixed) for ref in use.call.results] or [mixed]
        if use.call.role:
            return check_after(use, ROLES[use.call.role](use))
        if any(flow.kind is Kind.ONE for flow in flows):
            return of_one_sample(use, self._usual_results)
        return self._usual_results(use)

    def _usual_results(self, use: Use) -> list[Flow]:
        if all(flow.kind is Kind.FREE and flow.is_plain for flow in use.flows):
            free = self._free_results(use)
            if free is not None:
                check_statistics_of(use)
                return free
        check_random(use, is_drawing=_is_drawing(use.call))
        check_before(use)
        back = carried_back(use) if is_backward(use) else None
        return check_after(use, back or self._by_rule(use))

    def _by_rule(self, use: Use) -> list[Flow]:
        rule = rule_of(use.call.func)
        try:
            if rule is not None:
                return rule(use)
            found = split_alone(use)
            self._found.tried[use.name] = None
            return found
        except (CoupledError, NotFollowedError):
            raise
        except Exception as error:  # a rule that was not made for such arguments
            raise NotFollowedError("could not be followed") from error

    def _free_results(self, use: Use) -> list[Flow] | None:
        """Get what comes of tensors that do not depend on the batch; None if that is not clear."""
        if _is_drawing(use.call) or not _same_numbers(use):
            return None
        pairs = [(use.size_of(ref), use.other_size_of(ref)) for ref in use.call.results]
        if any(one != other for one, other in pairs):
            return None
        found = []
        for ref in use.call.results:
            counterpart = self._alignment.other_of[ref.number]
            flow = Flow(kind=Kind.FREE, axes=(None,) * len(use.size_of(ref)))
            if self._known(ref.number, counterpart).count(None) != 1:
                # Not where a value is known at one size alone: of a view of a large tensor, say.
                flow = self._with_values(flow, ref.number, counterpart)
            found.append(flow)
        if use.name in _ZEROS:
            return [replace(flow, is_uniform=True, value=0.0) for flow in found]
        if use.name == "scalar_tensor" and found[0].value is None:
            number = float(use.argument("s"))
            return [replace(found[0], is_uniform=True, value=number)]
        return found

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
        refs = written_refs(use)
        before = {ref.number: self._found.flows[ref.number] for ref in refs}
        for ref, flow in zip(use.call.results, flows, strict=False):
            self._set(ref.number, flow)
        for ref in refs:
            flow = self._after_writing(use, ref, flows)
            self._set(ref.number, flow)
            self._spread(use, ref, before[ref.number], flow)
            self._note_write(use, ref, flow)

    def _after_writing(self, use: Use, ref: Ref, flows: Sequence[Flow]) -> Flow:
        """Get what a tensor holds after it was written: what the result does that is this tensor.

        An operator that gives nothing back, or another tensor, keeps what does not depend on the
        batch as it is if nothing that it was given does.
        """
        for result, flow in zip(use.call.results, flows, strict=False):
            if result == ref:
                return flow
        num_dims = len(use.size_of(ref))
        bad = next((flow for flow in flows if flow.is_bad), None)
        if bad is not None:
            return replace(bad, axes=(None,) * num_dims)
        if all(flow.kind is Kind.FREE and flow.is_plain for flow in use.flows):
            return Flow(kind=Kind.FREE, axes=(None,) * num_dims)
        return self._bad(use, Kind.UNKNOWN, "writes into another tensor")[0]

    def _note_write(self, use: Use, ref: Ref, flow: Flow) -> None:
        if self._first.shapes[ref.number].storage in self._lasting:
            write = Write(ref.number, flow, culprit_of(use.call), use.call.is_backward)
            self._found.writes.append(write)

    def _spread(self, use: Use, ref: Ref, before: Flow, after: Flow) -> None:
        """Say of other views of the same memory what was written there."""
        written = self._first.shapes[ref.number]
        is_like = stays_like(before, after)
        for number in self._of_storage[written.storage]:
            if number == ref.number:
                continue
            flow, shape = self._found.flows[number], self._first.shapes[number]
            if flow.is_bad or is_apart(shape, written):
                continue
            if after.is_bad:
                self._found.flows[number] = replace(after, axes=(None,) * len(shape.sizes))
            elif (
                (is_like or is_compatible(flow, after))
                and not flow.is_positions
                and (
                    not any(axis is not None and axis.wild for axis in (*before.axes, *flow.axes))
                    or samples_lie_alike((shape, written), (flow, after))
                )
            ):
                self._found.flows[number] = written_to(flow, after)
            elif lies_like(shape, written):
                self._found.flows[number] = after
            else:
                sentence = "writes samples into memory that is seen in other ways as well"
                culprit = culprit_of(use.call)
                kind = Kind.MIXED if flow.kind is Kind.FREE else Kind.UNKNOWN
                self._found.flows[number] = _bad(kind, sentence, culprit, len(shape.sizes))


def _storages(recording: Dataflow, lasting: Mapping[int, str]) -> dict[int, str]:
    return {recording.shapes[number].storage: name for number, name in lasting.items()}


def _with_values(flow: Flow, values: tuple[Any, Any]) -> Flow:
    """Compare the numbers that a tensor holds at both sizes."""
    first, second = values
    if first == second:
        if first and len(set(first)) == 1:
            return replace(flow, value=first[0], is_uniform=True)
        return flow
    if first is None or second is None:
        return _differing(flow)
    if len(first) == len(second) == 1 and first[0] and second[0]:
        return replace(flow, ratio=second[0] / first[0])
    return _differing(flow)


def _differing(flow: Flow) -> Flow:
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
    return not differing_numbers(use)
