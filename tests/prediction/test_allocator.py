"""Replaying a trace gives its peak and what holds it, under the rules of an allocator."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.allocator.simulate import (
    CPU_RULES,
    CUDA_RULES,
    AllocatorRules,
    num_setup_events,
    peak_bytes,
    phase_starts,
    replay,
)
from memfit.prediction.card_replays import timeline_of
from memfit.trace.events import Allocation, Category, Phase, Trace

RULES = {"cpu": CPU_RULES, "cuda": CUDA_RULES}
EITHER = pytest.mark.parametrize("rules", RULES.values(), ids=RULES)


def block(
    num_bytes: int,
    category: Category = Category.TEMPORARIES,
    module: str = "layer",
    phase: Phase = Phase.FORWARD,
) -> Allocation:
    return Allocation(num_bytes, "addmm", phase, module, category)


def trace_of(sizes, events) -> Trace:
    return Trace(allocations=[block(num_bytes) for num_bytes in sizes], events=list(events))


@st.composite
def traces(draw) -> Trace:
    """Build a trace in which a block is freed at most once, and only after its allocation."""
    trace = Trace()
    alive: list[int] = []
    for _ in range(draw(st.integers(0, 40))):
        if alive and draw(st.booleans()):
            trace.events.append(-1 - alive.pop(draw(st.integers(0, len(alive) - 1))))
        else:
            index = len(trace.allocations)
            phase = draw(st.sampled_from(Phase))
            category = draw(st.sampled_from(Category))
            module = draw(st.sampled_from(["", "a", "a.b"]))
            trace.allocations.append(block(draw(st.integers(0, 5000)), category, module, phase))
            trace.events.append(index)
            alive.append(index)
    return trace


def test_the_peak_may_lie_in_the_middle():
    trace = trace_of([10, 500, 20], [0, 1, -2, 2])
    outcome = replay(trace, CPU_RULES)
    assert (outcome.peak_allocated_bytes, outcome.peak_event) == (510, 1)


def test_of_equal_peaks_the_first_is_described():
    trace = trace_of([8, 8], [0, -1, 1])
    trace.allocations[1].module = "later"
    assert replay(trace, CPU_RULES).by_module == {"layer": 8}


@pytest.mark.parametrize(
    ("num_bytes", "rounded"), [(0, 0), (1, 512), (512, 512), (513, 1024), (5000, 5120)]
)
def test_cuda_blocks_are_whole_multiples_of_512(num_bytes, rounded):
    assert CUDA_RULES.rounded(num_bytes) == rounded
    assert CPU_RULES.rounded(num_bytes) == num_bytes


def test_the_largest_blocks_come_first_and_are_at_most_ten():
    trace = trace_of(range(1, 15), range(14))
    sizes = [num_bytes for num_bytes, _ in replay(trace, CPU_RULES).largest]
    assert sizes == list(range(14, 4, -1))


def test_bytes_are_told_apart_by_category_and_module():
    trace = Trace(
        allocations=[
            block(10, Category.PARAMETERS, "a", Phase.SETUP),
            block(20, Category.BATCH, "", Phase.SETUP),
            block(30, Category.SAVED_ACTIVATIONS, "a"),
            block(40, Category.TEMPORARIES, "b"),
        ],
        events=[0, 1, 2, 3, -4],
    )
    outcome = replay(trace, CPU_RULES)
    held = {name: num_bytes for name, num_bytes in outcome.by_category.items() if num_bytes}
    assert held == {"parameters": 10, "batch": 20, "saved activations": 30, "temporaries": 40}
    assert list(outcome.by_module.items()) == [("a", 40), ("b", 40), ("", 20)]


def test_phases_begin_where_their_first_allocation_is():
    phases = [Phase.SETUP, Phase.SETUP, Phase.FORWARD, Phase.BACKWARD, Phase.FORWARD]
    trace = Trace(allocations=[block(1, phase=phase) for phase in phases])
    trace.events = [0, 1, 2, -3, 3, 4]
    assert num_setup_events(trace) == 2
    assert phase_starts(trace) == [(2, "forward"), (4, "backward"), (5, "forward")]


def test_a_trace_of_setup_alone_has_no_event_of_its_own():
    trace = Trace(allocations=[block(1, phase=Phase.SETUP)], events=[0])
    assert num_setup_events(trace) == 1
    assert phase_starts(trace) == []


@pytest.mark.slow
@given(traces(), st.sampled_from(list(RULES.values())))
def test_the_peak_is_the_highest_prefix_sum(trace, rules):
    signed = (
        rules.rounded(delta) if delta >= 0 else -rules.rounded(-delta)
        for _, delta in trace.deltas()
    )
    sums = list(accumulate(signed, initial=0))
    assert peak_bytes(trace, rules) == max(sums)
    assert min(sums) >= 0


@pytest.mark.slow
@given(traces(), st.sampled_from(list(RULES.values())))
def test_categories_and_modules_add_up_to_the_peak(trace, rules):
    outcome = replay(trace, rules)
    assert outcome.peak_allocated_bytes == peak_bytes(trace, rules)
    assert sum(outcome.by_category.values()) == outcome.peak_allocated_bytes
    assert sum(outcome.by_module.values()) == outcome.peak_allocated_bytes
    assert sum(num_bytes for num_bytes, _ in outcome.largest) <= outcome.peak_allocated_bytes


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_rounding_gives_the_next_multiple(num_bytes, granularity_bytes):
    rounded = AllocatorRules(granularity_bytes=granularity_bytes).rounded(num_bytes)
    assert rounded % granularity_bytes == 0
    assert 0 <= rounded - num_bytes < granularity_bytes


@pytest.mark.slow
@EITHER
@given(trace=traces())
def test_a_timeline_never_rises_above_the_peak_and_is_the_sum_of_its_parts(rules, trace):
    # What lives when a step begins comes first in every recorded trace.
    setup = [block(700, Category.PARAMETERS, phase=Phase.SETUP)]
    rest = [block(b.num_bytes, b.category, b.module) for b in trace.allocations]
    events = [event + 1 if event >= 0 else event - 1 for event in trace.events]
    whole = Trace(allocations=setup + rest, events=[0, *events])
    timeline = timeline_of(whole, rules)
    assert max(timeline.allocated_bytes) == peak_bytes(whole, rules)
    assert len(timeline.allocated_bytes) == 1 + len(events)
    parts = zip(*timeline.by_category.values(), strict=True)
    assert [sum(column) for column in parts] == list(timeline.allocated_bytes)
    assert timeline.allocated_bytes[0] == rules.rounded(700)
