"""The monitor measures the peaks of steps, and costs no more than it may."""

from __future__ import annotations

import time

import pytest
import torch

import memfit
from memfit import Job
from memfit.observe import monitor as monitor_module
from memfit.observe.allocator_events import AllocatorWatch, GrowthWatch
from memfit.observe.monitor import StepMonitor, storage_bytes
from memfit.trace.events import Category
from memfit.trace.recorder import Owned

FLOAT = 4

WATCHED_SECONDS = 1.5


class Clock:
    """Tell a time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now_seconds = 0.0

    def perf_counter(self) -> float:
        return self.now_seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(monitor_module.time, "perf_counter", clock.perf_counter)
    return clock


def owned_of(*tensors) -> list[Owned]:
    return [Owned(tensor, Category.PARAMETERS, "") for tensor in tensors]


def observe(monitor, clock, *, plain_seconds=1.0, watched_seconds=WATCHED_SECONDS, batch_bytes=10):
    """Run a made-up step, which takes longer while it is watched; say if it was."""
    is_watching = []
    monitor_watch = monitor_module.AllocatorWatch

    class Watch(monitor_watch):
        def __enter__(self):
            is_watching.append(True)
            return super().__enter__()

    monitor_module.AllocatorWatch = Watch
    try:
        with monitor.observe([], batch_bytes) as reading:
            clock.now_seconds += watched_seconds if is_watching else plain_seconds
    finally:
        monitor_module.AllocatorWatch = monitor_watch
    assert (reading.measured_peak_bytes is not None) == bool(is_watching)
    return bool(is_watching)


# --- What is measured ---


def test_the_peak_is_what_lived_before_and_the_highest_growth():
    monitor = StepMonitor("cpu")
    weight = torch.zeros(100)
    with monitor.observe(owned_of(weight), batch_bytes=1) as reading:
        first = torch.zeros(1000)
        second = torch.zeros(500)
        del first
        third = torch.zeros(200)
        del second, third
    assert reading.measured_peak_bytes == (100 + 1000 + 500) * FLOAT
    assert monitor.highest_peak_bytes == reading.measured_peak_bytes


def test_the_highest_of_all_peaks_is_kept():
    monitor = StepMonitor("cpu")
    for num_elements in (10, 3000, 20):
        with monitor.observe([], batch_bytes=1):
            torch.zeros(num_elements)
    assert monitor.highest_peak_bytes == 3000 * FLOAT


def test_before_the_first_step_nothing_is_known():
    assert StepMonitor("cpu").highest_peak_bytes is None


def test_each_storage_counts_once_whoever_shares_it():
    base = torch.zeros(10)
    assert storage_bytes(owned_of(base, base[:2], base.view(5, 2))) == 10 * FLOAT
    assert storage_bytes(owned_of(base, torch.zeros(3))) == 13 * FLOAT
    assert storage_bytes([]) == 0


def test_the_time_of_every_step_is_told():
    with StepMonitor("cpu").observe([], batch_bytes=1) as reading:
        time.sleep(0.002)
    assert reading.step_seconds >= 0.002


def test_a_step_that_fails_passes_its_error_on_and_the_next_is_measured():
    monitor = StepMonitor("cpu")
    with pytest.raises(ValueError, match="a bad batch"), monitor.observe([], batch_bytes=1):
        raise ValueError("a bad batch")
    with monitor.observe([], batch_bytes=1) as reading:
        torch.zeros(25)
    assert reading.measured_peak_bytes == 100


# --- When it measures ---


def test_the_first_steps_are_measured(clock):
    monitor = StepMonitor("cpu")
    assert [observe(monitor, clock) for _ in range(6)] == [True] * 3 + [False] * 3


def test_a_batch_larger_than_any_before_is_measured(clock):
    monitor = StepMonitor("cpu")
    sizes = [10, 10, 10, 10, 11, 10, 11, 12]
    watched = [observe(monitor, clock, batch_bytes=batch_bytes) for batch_bytes in sizes]
    assert watched == [True] * 3 + [False, True, False, False, True]


@pytest.mark.parametrize("overhead_fraction", [0.01, 0.05])
def test_watching_costs_no_more_than_its_share_in_the_long_run(clock, overhead_fraction):
    monitor = StepMonitor("cpu", overhead_fraction)
    num_steps = 2000
    watched = [observe(monitor, clock) for _ in range(num_steps)]
    cost_seconds = sum(watched) * WATCHED_SECONDS
    assert cost_seconds <= overhead_fraction * clock.now_seconds
    assert sum(watched) > 3, "it goes on measuring"
    assert sum(watched) >= 0.8 * overhead_fraction * num_steps / WATCHED_SECONDS


def test_watched_steps_that_happen_to_be_quick_do_not_make_watching_look_free(clock):
    monitor = StepMonitor("cpu")
    watched = [observe(monitor, clock, watched_seconds=0.5) for _ in range(500)]
    assert sum(watched) <= 10


# --- The allocator's events ---


def test_every_allocation_and_free_is_an_event_in_order():
    with AllocatorWatch() as watch:
        first = torch.empty(100)
        second = torch.empty(50)
        del first
        del second
    events = [event for event in watch.events() if abs(event.num_bytes) in {400, 200}]
    assert [event.num_bytes for event in events] == [400, 200, -400, -200]
    assert events[0].address == events[2].address != events[1].address
    assert [event.time_ns for event in events] == sorted(event.time_ns for event in events)
    assert watch.highest_growth_bytes() == 600


def test_growth_alone_is_the_same_growth_without_any_operator():
    def allocate():
        kept = torch.zeros(1000) + 1
        return torch.zeros(200) + kept[:200]

    allocate()
    with AllocatorWatch() as watch, torch.profiler.record_function("range"):
        allocate()
    growth = GrowthWatch()
    growth.begin()
    with torch.profiler.record_function("range"):
        allocate()
    growth.end()
    assert growth.highest_growth_bytes() == watch.highest_growth_bytes() > 0
    assert {event.name() for event in growth._results.events()} == {"[memory]"}


def test_marks_are_found_by_their_prefix_in_order():
    with AllocatorWatch() as watch:
        for name in ("here::first", "elsewhere", "here::second"):
            with torch.profiler.record_function(name):
                torch.empty(3)
    assert [name for _, name in watch.marks("here::")] == ["first", "second"]


def test_nothing_allocated_is_no_growth():
    with AllocatorWatch() as watch:
        pass
    assert watch.highest_growth_bytes() == 0
    assert watch.events() == []


def test_a_step_inside_the_callers_own_profile_is_not_watched():
    job = Job(
        model=lambda: torch.nn.Linear(4, 1),
        batch=lambda num_samples: torch.randn(num_samples, 4),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=2,
    )
    run = memfit.start(job)
    with torch.profiler.profile():
        profiled = run.step(torch.randn(2, 4))
    assert profiled.measured_peak_bytes is None
    assert run.step(torch.randn(2, 4)).measured_peak_bytes is not None
