"""The leak finder changes nothing: it keeps nothing alive, calls nothing and takes little time."""

import gc
import random
import sys
import time
import tracemalloc
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from memfit.observe.leaks import LeakFinder, LeakLimits, outside, signals
from memfit.observe.leaks import finder as finder_module
from memfit.observe.leaks.contents import frame_variables
from memfit.observe.leaks.finder import TimeBudget
from memfit.observe.leaks.lines import LineWatch
from memfit.observe.leaks.signals import MemoryInUse, Trend
from memfit.observe.leaks.streams import Stream
from memfit.observe.leaks.walk import take_look


def holders(look) -> dict[str, object]:
    return {node.holder(): node for node in look.nodes.values()}


class Hostile:
    """An object whose own code must never run."""

    calls = 0

    def __init__(self) -> None:
        object.__setattr__(self, "kept", [torch.ones(2000)])

    @property
    def __class__(self):
        Hostile.calls += 1
        return dict

    @property
    def danger(self):
        Hostile.calls += 1
        raise RuntimeError("a property was called")

    def __getattribute__(self, name):
        Hostile.calls += 1
        raise RuntimeError("an attribute was asked for")

    def __eq__(self, other):
        Hostile.calls += 1
        raise RuntimeError("it was compared")

    def __hash__(self):
        return 1

    def __len__(self):
        Hostile.calls += 1
        raise RuntimeError("its length was asked for")

    def __repr__(self):
        Hostile.calls += 1
        raise RuntimeError("it was written")


class HostileList(list):
    def __iter__(self):
        raise RuntimeError("it was iterated")

    def __len__(self):
        raise RuntimeError("its length was asked for")


def test_code_of_the_program_is_never_called() -> None:
    hostile = Hostile()
    table = {hostile: torch.ones(3000)}
    items = HostileList()
    list.append(items, torch.ones(3000))
    Hostile.calls = 0

    seen = holders(take_look())

    assert Hostile.calls == 0
    assert seen["hostile.kept"].num_bytes > 8000
    assert seen["items"].num_bytes > 12000
    del table


def test_what_is_looked_at_is_not_kept_alive() -> None:
    finder = LeakFinder(overhead_fraction=1.0)
    references = []
    for step in range(30):
        batch = torch.randn(64, 64)
        references.append(weakref.ref(batch))
        finder.boundary("train", step)
    alive = sum(reference() is not None for reference in references)
    assert alive == 1, "the loop's own variable"
    del batch
    assert all(reference() is None for reference in references)
    assert finder.finish() == ()


def test_reading_a_frame_leaves_no_reference_in_it() -> None:
    value = torch.ones(5)
    names = [name for name, _ in frame_variables(sys._getframe())]
    reference = weakref.ref(value)
    del value

    assert "value" in names
    assert reference() is None


def test_a_namespace_that_the_program_asked_for_is_left_as_it_is() -> None:
    kept = 5
    mine = locals()

    frame_variables(sys._getframe())

    assert mine["kept"] == kept


def test_random_states_and_tracing_are_left_as_they_were() -> None:
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    finder = LeakFinder(overhead_fraction=1.0)
    kept = []
    for step in range(40):
        kept.append([0] * 30_000)
        finder.boundary("train", step)
    finder.finish()

    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert np.array_equal(before[2], np.random.get_state()[1])
    assert not tracemalloc.is_tracing()
    assert not torch.overrides._get_current_function_mode_stack()


def test_tracing_of_the_program_is_left_on() -> None:
    tracemalloc.start()
    try:
        watch = LineWatch()
        watch.begin()
        made = torch.ones(3) + 1
        assert watch.end()
        assert tracemalloc.is_tracing()
        assert watch.line_of(made).startswith("leaks_alone.py:")
    finally:
        tracemalloc.stop()


def test_a_mode_of_the_program_is_not_disturbed() -> None:
    watch = LineWatch()
    with torch.device("cpu"):
        watch.begin()
        stack = torch.overrides._get_current_function_mode_stack()
        assert len(stack) == 1
    assert watch.end()

    watch.begin()
    with torch.device("cpu"):
        assert not watch.end()
    assert watch.end()


def test_calls_stay_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    # What other programs take of a busy machine is not the finder's.
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    model = nn.Linear(64, 64)
    finder = LeakFinder()
    started = time.perf_counter()
    step = 0
    while time.perf_counter() - started < 1.5:
        model(torch.randn(64, 64)).square().mean().backward()
        model.zero_grad()
        finder.boundary("train", step)
        step += 1
    spent, run = finder.spent_seconds, time.perf_counter() - started

    # Three times as much: a call is not cut short once it has begun.
    assert spent <= 3 * (0.05 + 0.005 * run) + 4e-6 * step
    assert finder.finish() == ()


def test_a_second_finish_gives_the_same_and_boundaries_after_it_do_nothing() -> None:
    finder = LeakFinder(overhead_fraction=1.0)
    losses = []
    model = nn.Linear(64, 64)
    for step in range(60):
        losses.append(model(torch.randn(256, 64)))
        finder.boundary("train", step)
    found = finder.finish()
    finder.boundary("train", 61)

    assert [event.holder for event in found] == ["losses"]
    assert finder.finish() == found


def test_limits_say_what_matters() -> None:
    kept = []
    limits = LeakLimits(least_bytes_per_step=100, least_rate_total_bytes=1000, list_steps=20)
    strict = LeakFinder(overhead_fraction=1.0, limits=limits)
    usual = LeakFinder(overhead_fraction=1.0)
    for step in range(40):
        kept.append(torch.ones(500))
        strict.boundary("train", step)
        usual.boundary("train", step)

    assert [event.holder for event in strict.finish()] == ["kept"]
    assert usual.finish() == ()


def test_saved_tensors_are_counted_without_unpacking_them() -> None:
    unpacked = []

    def unpack(packed):
        unpacked.append(packed)
        return packed

    weight = torch.randn(100, 100, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        hooked = (torch.randn(100, 100) @ weight).cos()
    plain = (torch.randn(100, 100) @ weight).cos()

    seen = holders(take_look())

    assert unpacked == []
    assert seen["plain"].num_graph_nodes >= 2
    assert seen["plain"].num_bytes > 2 * 40_000
    assert hooked.requires_grad
    assert plain.requires_grad


def test_pinned_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("memfit.observe.leaks.sizes._asks_pinned", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    finder = LeakFinder(overhead_fraction=1.0)
    buffers = []
    for step in range(140):
        buffers.append(torch.ones(20_000))
        finder.boundary("train", step)

    (event,) = finder.finish()

    assert (event.kind, event.holder) == ("pinned-memory", "buffers")
    assert "Pinned" in event.sentence


class Counting(TensorDataset):
    """A dataset whose workers are said to grow."""


@pytest.mark.parametrize(("grows", "found"), [(True, 1), (False, 0)])
def test_growing_workers_are_named_by_their_dataset(
    grows: bool, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0]

    def resident(process, *, without_shared):
        return 10**8 + 200_000 * (now[0] if grows else min(now[0], 300))

    monkeypatch.setattr(outside, "children", lambda process: [101, 102])
    monkeypatch.setattr(outside, "resident_bytes", resident)
    loader = DataLoader(Counting(torch.ones(8, 2)), num_workers=0)
    finder = LeakFinder(overhead_fraction=1.0)
    for step in range(1500):
        now[0] = step
        finder.boundary("train", step)
    events = finder.finish()

    assert len(events) == found
    for event in events:
        assert (event.kind, event.holder) == ("worker-memory", "loader.dataset")
        assert "Counting" in event.sentence
        assert "2 worker processes" in event.sentence
    assert loader.num_workers == 0


@pytest.mark.parametrize(
    ("level_of", "found"),
    [
        (lambda step: 400_000 * step, ["native"]),
        (lambda step: 400_000 * min(step, 700), []),
        (lambda step: 400_000 * (step % 90), []),
    ],
    ids=["steady", "stable", "sawtooth"],
)
def test_memory_outside_python_is_told_as_that(
    level_of, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0]

    def read():
        level = 10**9 + level_of(now[0])
        return MemoryInUse(host_bytes=level, device_bytes=0)

    monkeypatch.setattr(finder_module, "memory_in_use", read)
    monkeypatch.setattr(TimeBudget, "allows_probe", lambda *_, is_frequent: True)
    finder = LeakFinder(overhead_fraction=1.0)
    for step in range(1500):
        now[0] = step
        finder.boundary("train", step)
    events = finder.finish()

    assert [event.kind for event in events] == found
    assert all("probably" in event.sentence for event in events)


def test_a_trend_is_steady_only_if_every_part_grows() -> None:
    steady, stepped = Trend(), Trend()
    for count in range(400):
        steady.add(count, 1000 * count)
        stepped.add(count, 1000 * (count > 350))

    steps, grown = steady.steady_growth(100)
    assert grown == pytest.approx(1000 * steps, rel=0.05)
    assert stepped.steady_growth(100) is None


def test_passes_are_told_by_gaps_falling_steps_and_the_caller() -> None:
    train, validation = Stream("train"), Stream("validation")
    index = 0
    for _ in range(3):
        for _ in range(10):
            index += 1
            train.note(index, index)
        for step in range(4):
            index += 1
            validation.note(index, step)
    assert (train.pass_number, validation.pass_number) == (3, 3)
    assert validation.previous_length == 4
    assert train.is_between_passes(index)

    alone = Stream("train")
    for index in range(1, 21):
        alone.note(index, (index - 1) % 10)
    assert alone.pass_number == 2
    alone.end_pass()
    alone.note(21, 99)
    assert alone.pass_number == 3


def test_the_levels_of_this_process_follow_what_is_allocated() -> None:
    gc.collect()
    before = signals.memory_in_use()
    kept = torch.ones(4_000_000)
    after = signals.memory_in_use()
    del kept

    assert after.above(before) >= 15_000_000
    assert signals.memory_in_use().above(before) < 5_000_000
