"""The peaks of steps are measured, at no more cost than there may be."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

import memfit
from memfit.observe.allocator_blocks import living_blocks
from memfit.observe.allocator_events import AllocatorWatch, GrowthWatch, _notes_all_threads
from memfit.observe.peaks import CpuPeaks, CudaPeaks, storage_bytes
from memfit.trace.events import Category
from memfit.trace.recorder import Owned

FLOAT = 4

WATCHED_SECONDS = 1.5


def owned_of(*tensors) -> list[Owned]:
    return [Owned(tensor, Category.PARAMETERS, "") for tensor in tensors]


def peak_of(peaks, act=lambda: None, *, owned=(), batch_bytes=1) -> int | None:
    """Measure a step that takes no time."""
    peaks.begin(batch_bytes, owned)
    act()
    reading = peaks.end()
    peaks.account(reading, 0.0)
    return reading.measured_peak_bytes


def is_watched(peaks, *, plain_seconds=1.0, watched_seconds=WATCHED_SECONDS, batch_bytes=10):
    """Run a made-up step, which takes longer while it is watched; say if it was."""
    peaks.begin(batch_bytes, [])
    reading = peaks.end()
    watched = reading.measured_peak_bytes is not None
    peaks.account(reading, watched_seconds if watched else plain_seconds)
    return watched


# --- What is measured ---


def test_the_peak_is_what_lived_before_and_the_highest_growth():
    peaks = CpuPeaks()
    weight = torch.zeros(100)

    def step():
        first = torch.zeros(1000)
        second = torch.zeros(500)
        del first
        third = torch.zeros(200)
        del second, third

    assert peaks.highest_peak_bytes is None
    assert peak_of(peaks, step, owned=owned_of(weight)) == (100 + 1000 + 500) * FLOAT
    assert peaks.highest_peak_bytes == (100 + 1000 + 500) * FLOAT


def test_the_highest_of_all_peaks_is_kept():
    peaks = CpuPeaks()
    for num_elements in (10, 3000, 20):
        peak_of(peaks, lambda count=num_elements: torch.zeros(count))
    assert peaks.highest_peak_bytes == 3000 * FLOAT


@pytest.mark.parametrize("num_unwatched", [0, 1])
def test_gradients_that_end_inside_a_step_count_no_longer(num_unwatched):
    """Whether the step that they come from was watched or not."""
    weight = torch.zeros(100, requires_grad=True)

    def owned():
        gradients = [] if weight.grad is None else [weight.grad]
        return owned_of(weight) + [Owned(each, Category.GRADIENTS, "") for each in gradients]

    def step():
        weight.grad = None
        del owned_now[:]
        weight.grad = torch.zeros(100)

    owned_now = owned()
    peak_of(CpuPeaks(), step, owned=owned_now)
    for _ in range(num_unwatched):
        step()
    owned_now = owned()
    assert peak_of(CpuPeaks(), step, owned=owned_now) == 200 * FLOAT


def test_each_storage_counts_once_whoever_shares_it():
    base = torch.zeros(10)
    assert storage_bytes(owned_of(base, base[:2], base.view(5, 2))) == 10 * FLOAT
    assert storage_bytes(owned_of(base, torch.zeros(3))) == 13 * FLOAT
    assert storage_bytes([]) == 0


def test_a_step_that_is_dropped_ends_its_watch_and_the_next_is_measured():
    peaks = CpuPeaks()
    peaks.begin(1, [])
    assert torch.autograd._profiler_enabled()
    peaks.drop()
    assert not torch.autograd._profiler_enabled()
    assert peak_of(peaks, lambda: torch.zeros(25)) == 100


def test_on_a_card_the_allocators_counters_are_read_and_begin_anew(monkeypatch):
    stats = {
        "allocated_bytes": {"all": {"peak": 5}},
        "reserved_bytes": {"all": {"peak": 7}},
        "num_alloc_retries": 2,
    }
    resets = []
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: resets.append(1))
    peaks = CudaPeaks()
    for _ in range(2):
        peaks.begin(0, None)
        peaks.begin(8, None)  # the batch has come; the step goes on
        reading = peaks.end()
    assert reading.measured_peak_bytes == 5
    assert (reading.reserved_peak_bytes, reading.allocator_retries) == (7, 2)
    assert resets == [1, 1]


@pytest.fixture
def talks_to_ranks(tmp_path):
    """Open a process group of one rank, over gloo."""
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def in_another_thread(act) -> None:
    """Act where no profiler is, as threads of gloo's do."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


@pytest.mark.usefixtures("talks_to_ranks")
@pytest.mark.parametrize("is_known", [True, False])
def test_what_another_thread_frees_is_free_where_ranks_talk(is_known):
    """Two blocks one after the other, each ended elsewhere, are never there together."""
    weight = torch.zeros(100)

    def step():
        for count in (50_000, 40_000, 30_000):
            staged = [torch.zeros(count)]
            in_another_thread(staged.clear)

    owned = owned_of(weight) if is_known else None
    before = 100 * FLOAT if is_known else sum(living_blocks().values())
    assert abs(peak_of(CpuPeaks(), step, owned=owned) - before - 50_000 * FLOAT) <= 64


@pytest.mark.usefixtures("talks_to_ranks")
@pytest.mark.parametrize("is_known", [True, False])
def test_what_another_thread_takes_is_held_where_ranks_talk(is_known):
    weight = torch.zeros(100)
    taken = []

    def step():
        beside = torch.zeros(1000)
        in_another_thread(lambda: taken.append(torch.zeros(50_000)))
        torch.zeros(500)
        in_another_thread(taken.clear)
        del beside
        torch.zeros(2000)

    owned = owned_of(weight) if is_known else None
    before = 100 * FLOAT if is_known else sum(living_blocks().values())
    assert abs(peak_of(CpuPeaks(), step, owned=owned) - before - 51_500 * FLOAT) <= 64


@pytest.mark.usefixtures("talks_to_ranks")
def test_other_threads_are_listened_to_during_a_step_alone():
    assert not _notes_all_threads()
    peak_of(CpuPeaks(), lambda: None)
    assert not _notes_all_threads()


# --- When it measures ---


def test_the_first_steps_are_measured():
    peaks = CpuPeaks()
    assert [is_watched(peaks) for _ in range(6)] == [True] * 3 + [False] * 3


def test_the_first_steps_of_another_training_are_measured_unless_there_are_many():
    peaks = CpuPeaks()
    for _ in range(3):
        assert [is_watched(peaks) for _ in range(5)] == [True] * 3 + [False] * 2
        peaks.begin_training()
    assert not is_watched(peaks)


def test_a_batch_larger_than_any_before_is_measured():
    peaks = CpuPeaks()
    sizes = [10, 10, 10, 10, 11, 10, 11, 12]
    watched = [is_watched(peaks, batch_bytes=batch_bytes) for batch_bytes in sizes]
    assert watched == [True] * 3 + [False, True, False, False, True]


@pytest.mark.parametrize("overhead_fraction", [0.01, 0.05])
def test_watching_costs_no_more_than_its_share_in_the_long_run(overhead_fraction):
    peaks = CpuPeaks(overhead_fraction)
    num_steps = 2000
    watched = [is_watched(peaks) for _ in range(num_steps)]
    cost_seconds = sum(watched) * WATCHED_SECONDS
    all_seconds = cost_seconds + num_steps - sum(watched)
    assert cost_seconds <= overhead_fraction * all_seconds
    assert sum(watched) > 3, "it goes on measuring"
    assert sum(watched) >= 0.8 * overhead_fraction * num_steps / WATCHED_SECONDS


def test_watched_steps_that_happen_to_be_quick_do_not_make_watching_look_free():
    peaks = CpuPeaks()
    watched = [is_watched(peaks, watched_seconds=0.5) for _ in range(500)]
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
    sizes = [[event.num_bytes for event in each.events()] for each in (growth, watch)]
    assert sizes[0] == sizes[1]


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


def test_a_step_inside_the_callers_own_profile_is_not_watched(regression_job):
    run = memfit.start(regression_job)
    with torch.profiler.profile():
        profiled = run.step(regression_job.batch(2))
    assert profiled.measured_peak_bytes is None
    assert run.step(regression_job.batch(2)).measured_peak_bytes is not None
