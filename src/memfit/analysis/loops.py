"""Rolls Python loops over samples up: what is done to every sample alike is kept once.

``for row in batch`` calls the same operators for each sample, so that recordings at two batch sizes
have different lengths and cannot be laid side by side. What belongs to one sample is a program: the
operators that made it, their other arguments, and what it shares with all samples; which sample it
is, is left out. A loop is rolled up only if there is the same program for every sample of the batch
and all of them end together: stacked in order, added up, or, for gradients, put back each in its
own place. Nothing is assumed of the tensors; what they mean is found by following what is left.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.analysis.alignment import culprit_of
from memfit.analysis.dataflow import Call, Dataflow, Ref, Role, refs_in
from memfit.analysis.memory import writes_of
from memfit.analysis.separability import Culprit
from memfit.analysis.use import operator_name
from memfit.trace.operators import draws

_TAKES = frozenset({"select", "slice", "unbind"})
_PLACES = frozenset({"select_backward", "slice_backward"})
_JOINS = frozenset({"stack", "cat"})
_ADDS = frozenset({"add", "add_"})
_ADD = torch.ops.aten.add.Tensor
_READS_MEMORY = frozenset({"as_strided", "set_", "resize_"})
"""Operators that may read more of a tensor's memory than the tensor."""


class NotRolledError(Exception):
    """Say at which call a loop does more than the same for each sample."""

    def __init__(self, call: Call) -> None:
        self.culprit = culprit_of(call)
        super().__init__(self.culprit)


@dataclass(frozen=True, slots=True)
class _One:
    """A tensor that belongs to one sample."""

    sample: int
    program: int
    version: int
    """How often its memory had been written."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """A tensor that belongs to no sample, or stands for those of all samples."""

    ref: Ref
    version: int


@dataclass(frozen=True, slots=True)
class _Parts:
    """A sum of which some terms belong to one sample each."""

    terms: Counter[tuple[int, int]]
    """How often a program's result for a sample is in it."""
    shared: tuple[_Shared, ...] = ()
    version: int = 0

    @classmethod
    def of(cls, parts: Sequence[_Parts], version: int = 0) -> _Parts:
        """Add sums up."""
        terms: Counter[tuple[int, int]] = Counter()
        for part in parts:
            terms.update(part.terms)
        return cls(terms, tuple(each for part in parts for each in part.shared), version)


def roll(recording: Dataflow, num_samples: int) -> Dataflow:
    """Return a recording in which what is done to every sample alike is done to the first alone.

    Args:
        recording: of a step.
        num_samples: of its batch, at least two.

    Raises:
        NotRolledError: if samples are treated differently, or meet inside of a loop.
    """
    return _Roller(recording, num_samples).run()


def loop_in(
    recordings: tuple[Dataflow, Dataflow], sizes: tuple[int, int], third: tuple[Dataflow, int]
) -> Culprit | None:
    """Find a line whose operators grow evenly in number with the batch, as those of a loop do.

    Args:
        recordings: of a step at two batch sizes.
        sizes: both, the larger first.
        third: another recording and its size, by which even growth is checked.

    Returns:
        The first operator that does; None if another one grows otherwise: a branch.
    """
    counts = [_num_results(each) for each in (*recordings, third[0])]
    found = None
    for key in counts[0] | counts[1]:
        first, second, other = (each[key] for each in counts)
        growth, rest = divmod(first - second, sizes[0] - sizes[1])
        if rest or growth < 0 or other - second != growth * (third[1] - sizes[1]):
            return None
        if growth and found is None:
            found = Culprit(operator=key[0].strip("_"), source_line=key[1])
    return found


def _num_results(recording: Dataflow) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for call in recording.calls:
        if not call.is_backward:
            found[operator_name(call.func), call.place.source_line] += max(1, len(call.results))
    return found


class _Roller:
    def __init__(self, recording: Dataflow, num_samples: int) -> None:
        self._recording, self._num_samples = recording, num_samples
        self._shapes = recording.shapes
        self._calls: list[Call] = []
        self._ones: dict[int, _One] = {}
        self._parts: dict[int, _Parts] = {}
        self._programs: dict[Any, int] = {}
        self._first_of: dict[int, _Shared] = {}
        """The first sample's tensor of each program."""
        self._terms_of: dict[tuple[int, int], _Parts] = {}
        """What a program adds up for a sample."""
        self._made: dict[Any, tuple[Ref, ...]] = {}
        """What was computed from what is shared, which every round of a loop may repeat."""
        self._same: dict[int, Ref] = {}
        self._versions: Counter[int] = Counter()
        """How often each memory has been written."""
        self._accumulated: set[int] = set()
        self._own: set[int] = set()
        """Memory that was made for one sample in a loop."""
        self._written = {
            self._storage(ref) for call in recording.calls for ref in writes_of(call)
        }  # fmt: skip
        self._outside = {self._shapes[number].storage for number in recording.foreign}
        self._num_views = Counter(shape.storage for shape in self._shapes)
        self._whole_groups = set(self._groups())

    def run(self) -> Dataflow:
        """Roll all loops up."""
        for call in self._recording.calls:
            self._meet(_renamed(call, self._same))
        if any(number in self._parts for number in self._accumulated):
            raise NotRolledError(self._recording.calls[-1])
        return replace(self._recording, calls=self._calls)

    def _groups(self) -> Iterator[Any]:
        """Yield what is taken apart, or put back, sample by sample, with none left out."""
        seen: defaultdict[Any, set[int]] = defaultdict(set)
        for call in self._recording.calls:
            group = self._group_of(call)
            if group is not None:
                seen[group[0]].update(group[1])
        return (key for key, samples in seen.items() if samples == set(range(self._num_samples)))

    def _group_of(self, call: Call) -> tuple[Any, Sequence[int]] | None:
        """Return what a call takes samples from, or puts one into, and which."""
        name, count = operator_name(call.func), self._num_samples
        if name not in _TAKES and name not in _PLACES:
            return None
        source, *given = call.arguments
        sizes = given.pop(0) if name in _PLACES else self._shapes[source.number].sizes
        dim = given.pop(0) % max(1, len(sizes))
        if not sizes or sizes[dim] != count:
            return None
        key = (name, dim, sizes if name in _PLACES else source)
        if name == "unbind":
            return key, range(count)
        if name.startswith("select"):
            return key, (given[0] % count,)
        part = range(count)[slice(*given[:3])]
        return (key, part) if len(part) == 1 else None

    def _meet(self, call: Call) -> None:
        refs = list(refs_in(call.arguments))
        ones = [self._one(ref, call) for ref in refs if ref.number in self._ones]
        has_parts = any(ref.number in self._parts for ref in refs)
        group = self._group_of(call)
        if group is not None and group[0] in self._whole_groups and not has_parts:
            if operator_name(call.func) in _PLACES:
                return self._place(call, ones, group[1][0])
            if not ones:
                return self._take(call, group)
        if not ones and not has_parts:
            return self._share(call)
        is_one = len({one.sample for one in ones}) == 1 and not has_parts
        if is_one and all(self._storage(ref) in self._own for ref in writes_of(call)):
            return self._compute(call, ones[0].sample)
        if operator_name(call.func) in _JOINS and not has_parts:
            return self._join(call, refs, ones)
        return self._add(call)

    def _take(self, call: Call, group: tuple[Any, Sequence[int]]) -> None:
        """Take samples out of a batch; the first is kept."""
        (name, dim, source), samples = group
        if name == "select" and self._shapes[source.number].stride[dim] == 0:
            return self._share(replace(call, arguments=(source, dim, 0)))  # all are one tensor
        is_new = call.results[0].number not in self._ones
        for sample, result in zip(samples, call.results, strict=True):
            self._note(result, sample, ("take", name, dim, self._written_as(source)))
        if is_new and samples[0] == 0:
            self._calls.append(replace(call, results=call.results[:1], role=Role.TAKE))
        return None

    def _place(self, call: Call, ones: Sequence[_One], sample: int) -> None:
        """Put a gradient back in its sample's place, among zeros; one stands for all of them."""
        if any(one.sample != sample for one in ones):
            raise NotRolledError(call)
        gradient, sizes, dim, *_ = call.arguments
        result = call.results[0]
        key = ("place", operator_name(call.func), sizes, dim, self._written_as(gradient))
        program = self._program(key, result)
        self._parts[result.number] = self._term(program, sample, self._version(result))
        if sample == 0:
            self._first_of.setdefault(program, self._as_shared(result))
            self._calls.append(replace(call, role=Role.PLACE))

    def _share(self, call: Call) -> None:
        """Keep what belongs to no sample, once if it is repeated with the same result."""
        written = writes_of(call)
        if not written and call.results == call.arguments[:1]:
            return  # the same tensor, detached
        is_kept = not {self._storage(ref) for ref in call.results} & self._written
        if call.results and is_kept and not written and not draws(call.func, call.arguments, {}):
            key = (call.func, self._written_as(call.arguments))
            made = self._made.setdefault(key, call.results)
            if made is not call.results:
                pairs = zip(call.results, made, strict=True)
                self._same |= {one.number: two for one, two in pairs if one != two}
                return
        for ref in written:
            self._versions[self._storage(ref)] += 1
        self._calls.append(call)

    def _compute(self, call: Call, sample: int) -> None:
        """Work on one sample, perhaps writing to what was made for it."""
        written = writes_of(call)
        if operator_name(call.func) in _READS_MEMORY or not set(written) <= set(call.results):
            raise NotRolledError(call)
        key = (call.func, self._written_as(call.arguments))
        for ref in written:
            self._versions[self._storage(ref)] += 1
            self._ones.pop(ref.number, None)
        is_new = any(result.number not in self._ones for result in call.results)
        known = {self._storage(ref) for ref in refs_in(call.arguments)}
        for place, result in enumerate(call.results):
            self._note(result, sample, ("result", key, place))
            if self._storage(result) not in known:
                self._own.add(self._storage(result))
        if self._is_sum(call) and not written:
            one = self._ones[call.results[0].number]
            parts = [self._parts_of(ref, call) for ref in refs_in(call.arguments)]
            self._terms_of.setdefault((one.program, sample), _Parts.of(parts))
        if sample == 0 and is_new:
            self._calls.append(call)

    def _join(self, call: Call, refs: Sequence[Ref], ones: Sequence[_One]) -> None:
        """Put the samples behind one another, in order."""
        is_whole = [one.sample for one in ones] == list(range(self._num_samples))
        if len(refs) != len(ones) or not is_whole or len({one.program for one in ones}) != 1:
            raise NotRolledError(call)
        arguments = ((refs[0],), *call.arguments[1:])
        self._calls.append(replace(call, arguments=arguments, role=Role.JOIN))

    def _add(self, call: Call) -> None:
        """Add up what belongs to several samples; once none is missing, that is a sum over all."""
        if not self._is_sum(call):
            raise NotRolledError(call)
        result = call.results[0]
        parts = [self._parts_of(ref, call) for ref in refs_in(call.arguments)]
        for ref in writes_of(call):
            if self._storage(ref) in self._outside or self._num_views[self._storage(ref)] > 1:
                raise NotRolledError(call)
            self._versions[self._storage(ref)] += 1
            self._accumulated.add(ref.number)
            self._ones.pop(ref.number, None)
        total = self._spelled_out(_Parts.of(parts, self._version(result)))
        self._parts[result.number] = total
        if not self._missing(total):
            del self._parts[result.number]
            self._keep_sum(call, total)

    def _keep_sum(self, call: Call, total: _Parts) -> None:
        programs = dict.fromkeys(program for program, _ in total.terms)
        terms = (*(self._first_of[program] for program in programs), *total.shared)
        for each in terms:
            if each.ref not in call.results and each.version != self._version(each.ref):
                raise NotRolledError(call)
        arguments = (tuple(each.ref for each in terms), 0, 1)
        self._calls.append(replace(call, func=_ADD, arguments=arguments, role=Role.SUM))

    def _is_sum(self, call: Call) -> bool:
        """Return whether terms of one shape and type are added up as they are."""
        if operator_name(call.func) not in _ADDS or len(call.arguments) != 3:
            return False
        first, second, weight = call.arguments
        shapes = [self._shapes[ref.number] for ref in (*refs_in(call.arguments), *call.results)]
        is_alike = len({(shape.sizes, shape.dtype) for shape in shapes}) == 1
        is_term = isinstance(second, Ref) or second == 0
        return isinstance(first, Ref) and is_term and weight == 1 and is_alike

    def _parts_of(self, ref: Ref, call: Call) -> _Parts:
        """Take a tensor for a sum."""
        if ref.number in self._parts:
            found = self._parts[ref.number]
            if found.version != self._version(ref):
                raise NotRolledError(call)
            return found
        if ref.number in self._ones:
            one = self._one(ref, call)
            return self._term(one.program, one.sample)
        return _Parts(Counter(), (self._as_shared(ref),))

    def _spelled_out(self, total: _Parts) -> _Parts:
        """Return what terms add up of which other samples have no like."""
        while True:
            known = [
                each for each in total.terms
                if each[0] in self._missing(total) and each in self._terms_of
            ]  # fmt: skip
            if not known:
                return total
            rest = total.terms - Counter(known)
            parts = [_Parts(rest, total.shared), *(self._terms_of[each] for each in known)]
            total = _Parts.of(parts, total.version)

    def _missing(self, total: _Parts) -> set[int]:
        """List the programs of which there is not one term for every sample."""
        samples: defaultdict[int, int] = defaultdict(int)
        for (program, _), count in total.terms.items():
            samples[program] += 1 if count == 1 else self._num_samples + 1
        return {program for program, count in samples.items() if count != self._num_samples}

    def _one(self, ref: Ref, call: Call) -> _One:
        one = self._ones[ref.number]
        if one.version != self._version(ref):
            raise NotRolledError(call)
        return one

    def _note(self, result: Ref, sample: int, key: Any) -> None:
        """Give a tensor its program; one that lies where another does is that one."""
        if result.number in self._ones:
            return
        program = self._program(key, result)
        self._ones[result.number] = _One(sample, program, self._version(result))
        if sample == 0:
            self._first_of.setdefault(program, self._as_shared(result))

    def _program(self, key: Any, result: Ref) -> int:
        shape = self._shapes[result.number]
        return self._programs.setdefault((key, shape.sizes, shape.dtype), len(self._programs))

    def _term(self, program: int, sample: int, version: int = 0) -> _Parts:
        return _Parts(Counter({(program, sample): 1}), version=version)

    def _written_as(self, value: Any) -> Any:
        """Write arguments down without saying which sample they are of."""
        if isinstance(value, tuple):
            return tuple(self._written_as(each) for each in value)
        if not isinstance(value, Ref):
            return type(value), repr(value)
        one = self._ones.get(value.number)
        return ("one", one.program) if one else ("shared", self._as_shared(value))

    def _as_shared(self, ref: Ref) -> _Shared:
        return _Shared(ref, self._version(ref))

    def _storage(self, ref: Ref) -> int:
        return self._shapes[ref.number].storage

    def _version(self, ref: Ref) -> int:
        return self._versions[self._storage(ref)]


def _renamed(call: Call, names: dict[int, Ref]) -> Call:
    """Return a call whose tensors are those that were computed first."""
    if not any(ref.number in names for ref in refs_in(call.arguments)):
        return call

    def renamed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(renamed, value))
        return names.get(value.number, value) if isinstance(value, Ref) else value

    return replace(call, arguments=renamed(call.arguments))
