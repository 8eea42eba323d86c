"""Decides which tensors of a forward are held whole, and in which stages they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

from memfit.strategies.convolution_tiling.capture import Call
from memfit.strategies.convolution_tiling.rules import Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One value held whole, or the statistics of a norm, or a call that must see everything.

    Attributes:
        call: the call whose result is wanted; for statistics, the norm.
        target: the value that is computed; for statistics, the norm's input.
        kind: "rows", "statistics" or "whole".
        sources: held values that it reads.
        members: values that it computes on the way, in order, the target last.
        num_tiles: in how many tiles.
    """

    call: Call
    target: int
    kind: str
    sources: tuple[int, ...]
    members: tuple[int, ...]
    num_tiles: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What is held whole, and the stages in order."""

    rules: Rules
    held: frozenset[int]
    stages: tuple[Stage, ...]


def schedule(rules: Rules, num_tiles: int, recompute: float) -> Schedule:
    """Hold the results of convolutions, but for those that are cheap to compute again."""
    held = _held(_Question(rules=rules, recompute=recompute))
    stages = _stages(rules, set(held))
    work = [
        sum(rules.graph.values[each].num_bytes for each in (*stage.members, *stage.sources))
        for stage in stages
    ]
    most = max(work, default=1)
    sized = []
    for stage, num_bytes in zip(stages, work, strict=True):
        tiles = max(1, -(-num_bytes * num_tiles // most)) if stage.kind != "whole" else 1
        sized.append(replace(stage, num_tiles=tiles))
    return Schedule(rules=rules, held=held, stages=tuple(sized))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Question:
    """What to hold of a graph; equal for all graphs of the same calls and shapes."""

    rules: Rules
    recompute: float

    @cached_property
    def text(self) -> str:
        graph = self.rules.graph
        calls = [(each.name, each.args, each.kwargs, each.outs) for each in graph.calls]
        return repr((graph.values, calls, graph.outputs, graph.num_inputs, self.recompute))

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Question) and self.text == other.text


@lru_cache(maxsize=64)
def _held(question: _Question) -> frozenset[int]:
    """Find out what to hold; a plan asks for the same many times, and an answer takes seconds."""
    rules = question.rules
    graph = rules.graph
    fixed = set(range(graph.num_inputs)) | set(graph.outputs)
    for call in graph.calls:
        if not set(call.outs) <= rules.locals.keys():
            fixed.update(call.outs)
            fixed.update(each for each in call.inputs if each >= graph.num_given)
    free = {index for index in rules.locals if rules.flops(index)} - fixed
    return frozenset(_thinned(rules, fixed | free, free, question.recompute))


def _thinned(rules: Rules, held: set[int], free: set[int], recompute: float) -> set[int]:
    """Leave out one result after the other, while what is computed twice stays below a part."""
    plain = 3 * sum(rules.flops(index) for index in rules.locals) or 1
    stages = _stages(rules, held)
    size, cost = _most_bytes(rules, held, stages), _flops(rules, stages)
    while True:
        best = None
        for index in free & held:
            fewer = held - {index}
            stages = _stages(rules, fewer)
            flops = _flops(rules, stages)
            if flops / plain - 1 > recompute:
                continue
            peak = _most_bytes(rules, fewer, stages)
            gain = (size - peak + 0.1 * rules.graph.values[index].num_bytes) / max(
                flops - cost, 1e-3 * plain
            )
            if gain > 0 and (best is None or gain > best[0]):
                best = gain, fewer, peak, flops
        if best is None:
            return held
        _, held, size, cost = best


def _flops(rules: Rules, stages: Sequence[Stage]) -> int:
    """Count those of forward and backward; backward computes all but a stage's target again."""
    total = 0
    for stage in stages:
        for index in stage.members:
            flops = rules.flops(index)
            is_target = index == stage.target and stage.kind == "rows"
            direct = is_target and index in rules.convolutions
            total += flops * (3 if direct else 4)
    return total


def _most_bytes(rules: Rules, held: set[int], stages: Sequence[Stage]) -> int:
    """Return the most bytes of held tensors and their gradients at any point of backward."""
    graph = rules.graph
    born = {stage.target: place for place, stage in enumerate(stages) if stage.target in held}
    last: dict[int, int] = {}
    for place, stage in enumerate(stages):
        if stage.kind == "whole":
            born.update(dict.fromkeys(stage.call.outs, place))
        last.update(dict.fromkeys(stage.sources, place))
    changes = [0] * (len(stages) + 1)
    for index in held:
        if index < graph.num_inputs:
            continue
        size, start = graph.values[index].num_bytes, born.get(index, 0)
        if index not in graph.outputs:
            changes[start] += size
        if index in last:
            changes[start] += size
            changes[last[index] + 1] -= size
    return max(accumulate(changes))


def _stages(rules: Rules, held: set[int]) -> list[Stage]:
    """Put the stages in the order of the calls."""
    stages = []
    for call in rules.graph.calls:
        out = call.outs[0]
        if out not in rules.locals:
            given = [each for each in call.inputs if each >= rules.graph.num_given]
            given += [each for each in call.inputs if each < rules.graph.num_inputs]
            stages.append(
                Stage(call=call, target=out, kind="whole", sources=tuple(given), members=())
            )
            continue
        if out in rules.norms:
            source = rules.norms[out].source
            members, sources = _ancestors(rules, held, source, is_target=False)
            stages.append(
                Stage(call=call, target=source, kind="statistics", sources=sources, members=members)
            )
        if out in held:
            members, sources = _ancestors(rules, held, out, is_target=True)
            stages.append(
                Stage(call=call, target=out, kind="rows", sources=sources, members=members)
            )
    return stages


def _ancestors(
    rules: Rules, held: set[int], target: int, *, is_target: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what is computed on the way to a value, and the held values that this starts from."""
    members: set[int] = set()
    sources: set[int] = set()
    waiting = [target]
    while waiting:
        index = waiting.pop()
        if index in members or index in sources:
            continue
        if index not in rules.locals or (index in held and not (is_target and index == target)):
            sources.add(index)
            continue
        members.add(index)
        waiting += [
            each
            for each in rules.call_of[index].inputs
            if each in rules.dims or each >= rules.graph.num_given or each < rules.graph.num_inputs
        ]
    return tuple(sorted(members)), tuple(sorted(sources))
