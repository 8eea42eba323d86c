"""What lives before a step is watched counts as torch's allocator counts it, until it ends."""

from __future__ import annotations

import gc
import io
import math

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from memfit.observe import allocator_blocks
from memfit.observe.allocator_blocks import living_blocks
from memfit.observe.allocator_events import AllocatorWatch
from memfit.observe.peaks import CpuPeaks

MANY = 250_000
"""Elements of float32: a megabyte."""


def watched_bytes(act) -> int:
    """Watch a step whose tensors nobody has listed."""
    peaks = CpuPeaks()
    peaks.begin(1, None)
    act()
    peak_bytes = peaks.end().measured_peak_bytes
    assert peak_bytes is not None
    return peak_bytes


def growth_of(make, others_bytes) -> int:
    kept = make()
    growth_bytes = sum(living_blocks().values()) - others_bytes
    del kept
    return growth_bytes


# --- What counts ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(MANY),
        lambda: torch.nn.Parameter(torch.zeros(MANY)),
        lambda: [(base := torch.zeros(MANY)), base[3:], base.view(2, -1), torch._lazy_clone(base)],
        lambda: torch.zeros(MANY).share_memory_(),
    ],
    ids=["tensor", "parameter", "views", "shared memory"],
)
def test_each_block_counts_once(make, others_bytes):
    assert growth_of(make, others_bytes) == pytest.approx(4 * MANY, abs=64)


@pytest.mark.slow
def test_what_was_loaded_counts(others_bytes):
    file = io.BytesIO()
    torch.save(torch.zeros(MANY), file)
    file.seek(0)
    assert growth_of(lambda: torch.load(file), others_bytes) == 4 * MANY


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.from_numpy(np.zeros(MANY, dtype=np.float32)),
        lambda: torch.frombuffer(bytearray(4 * MANY), dtype=torch.float32),
        lambda: torch.from_dlpack(np.zeros(MANY, dtype=np.float32)),
        lambda: torch.zeros(MANY, device="meta"),
    ],
    ids=["numpy", "buffer", "dlpack", "meta"],
)
@pytest.mark.parametrize("knows_deleter", [True, False])
def test_memory_that_the_allocator_never_gave_does_not_count(
    make, knows_deleter, others_bytes, monkeypatch
):
    if not knows_deleter:
        monkeypatch.setattr(allocator_blocks, "_own_deleter", lambda: None)
        others_bytes = sum(living_blocks().values())
    assert growth_of(make, others_bytes) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_the_parts_of_sparse_tensors_count(others_bytes):
    indices = torch.arange(MANY)[None]
    sparse = torch.sparse_coo_tensor(indices, torch.ones(MANY), (MANY,), check_invariants=True)
    del indices
    sparse_bytes = (8 + 4) * MANY
    assert sum(living_blocks().values()) - others_bytes == sparse_bytes, sparse.shape
    rows, columns = torch.arange(101), torch.arange(100)
    compressed = torch.sparse_csr_tensor(rows, columns, torch.ones(100), check_invariants=True)
    del rows, columns
    growth_bytes = sum(living_blocks().values()) - others_bytes - sparse_bytes
    assert growth_bytes == 101 * 8 + 100 * 8 + 100 * 4, compressed.shape


@pytest.mark.slow
def test_gradients_that_nobody_has_asked_for_count(others_bytes):
    weight = torch.zeros(MANY, requires_grad=True)
    hidden = weight * 1
    hidden.retain_grad()
    hidden.sum().backward()
    del hidden
    gc.collect()
    assert sum(living_blocks().values()) - others_bytes == pytest.approx(8 * MANY, abs=64)
    assert weight.grad is not None


@pytest.mark.slow
def test_tensors_that_were_never_completed_are_left_out():
    tensors = [torch.nn.UninitializedParameter(), torch.nn.UninitializedBuffer()]
    assert living_blocks() is not None, tensors


# --- When it ends ---


@pytest.mark.slow
def test_a_block_that_ends_in_a_watched_step_counts_no_longer(others_bytes):
    held = [torch.zeros(MANY)]

    def step():
        held.clear()
        torch.zeros(MANY // 2)

    assert watched_bytes(step) - others_bytes == pytest.approx(4 * MANY, abs=64)


@pytest.mark.slow
def test_steps_after_unwatched_ones_are_measured_as_the_allocator_counts():
    def loop(between_steps) -> None:
        """Train as scripts do: the last step's outcomes live until the next ones take their place."""
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
        optimizer = torch.optim.Adam(model.parameters())
        data = torch.from_numpy(np.zeros((512, 256), dtype=np.float32))
        hidden = loss = None
        for step in range(4):
            between_steps(step)
            hidden = model(data + step)
            loss = hidden.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        between_steps(4)
        assert hidden is not loss

    gc.collect()
    others_bytes = sum(living_blocks().values())
    with AllocatorWatch() as whole:
        loop(_mark)
    true_peaks = _peaks_between(whole, whole.marks("step::"))
    peaks, found = CpuPeaks(), []

    def between(step: int) -> None:
        if step == 2:
            peaks.begin(1, None)
        elif step == 3:
            found.append(peaks.end().measured_peak_bytes)

    loop(between)
    assert found[0] - others_bytes == true_peaks[2]


def _mark(step: int) -> None:
    with torch.profiler.record_function(f"step::{step}"):
        pass


def _peaks_between(watch, marks) -> list[int]:
    """Return the highest sum from each mark to the next, with what lived before it."""
    bounds = [at for at, _ in marks] + [math.inf]
    live_bytes, peaks = 0, [0] * len(marks)
    current = -1
    for event in watch.events():
        while event.time_ns >= bounds[current + 1]:
            current += 1
            peaks[current] = live_bytes
        live_bytes += event.num_bytes
        if current >= 0:
            peaks[current] = max(peaks[current], live_bytes)
    return peaks


@pytest.fixture(params=["file_descriptor", "file_system"])
def sharing(request):
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(request.param)
    yield
    torch.multiprocessing.set_sharing_strategy(before)


@pytest.mark.slow
@pytest.mark.usefixtures("sharing")
def test_memory_of_workers_that_ends_in_a_watched_step_counts_no_longer(others_bytes):
    held = [torch.zeros(MANY).share_memory_()]
    peak_bytes = watched_bytes(lambda: (held.clear(), torch.zeros(MANY // 2)))
    assert peak_bytes - others_bytes == pytest.approx(4 * MANY, abs=64)


@pytest.mark.slow
def test_a_size_that_the_allocator_remembers_wrongly_is_put_right(others_bytes):
    """A block made in a profile and freed outside leaves its size behind for the next one there."""
    firsts: list[torch.Tensor] = []
    for _ in range(20):
        watched_bytes(lambda: firsts.append(torch.empty(MANY)))
        first = firsts.pop()
        address = first.data_ptr()
        del first
        second = torch.empty(MANY - 64)
        if second.data_ptr() == address:
            break
    held = [second]
    del second
    peak_bytes = watched_bytes(lambda: (held.clear(), torch.zeros(MANY)))
    assert peak_bytes - others_bytes == pytest.approx(4 * MANY, abs=64)


@pytest.mark.slow
def test_the_end_of_what_was_never_found_is_not_taken_off(tmp_path):
    path = tmp_path / "weights.pt"
    torch.save(torch.zeros(MANY), path)
    held = [torch.load(path, mmap=True)]  # torch reports the end of its mapping
    others_bytes = sum(living_blocks().values())
    peak_bytes = watched_bytes(lambda: (held.clear(), torch.zeros(MANY)))
    assert peak_bytes - others_bytes == pytest.approx(4 * MANY, abs=64)


# --- Where torch does not let it be seen ---


def test_nothing_is_measured_where_torch_does_not_show_the_ends_of_blocks(monkeypatch):
    monkeypatch.setattr(allocator_blocks, "_noting", lambda: None)
    peaks = CpuPeaks()
    peaks.begin(1, None)
    assert peaks.end().measured_peak_bytes is None
    assert "does not let blocks be noted" in peaks.given_up
    assert not torch.autograd._profiler_enabled()


@pytest.fixture
def single_rank(tmp_path):
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("is_shown", [True, False])
@pytest.mark.usefixtures("single_rank")
def test_buckets_that_only_c_knows_are_not_passed_over(is_shown):
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Linear(500, 500), gradient_as_bucket_view=is_shown
    )
    model(torch.zeros(2, 500)).sum().backward()
    peaks = CpuPeaks()
    peaks.begin(1, None)
    assert (peaks.end().measured_peak_bytes is not None) == is_shown
    assert ("gradient_as_bucket_view" not in peaks.given_up) == is_shown
    model.zero_grad()
    peaks = CpuPeaks()
    peaks.begin(1, None)
    assert peaks.end().measured_peak_bytes is None, "the gradients no longer show the buckets"


@pytest.mark.slow
def test_a_wrapper_whose_construction_ended_early_hides_nothing():
    unfinished = DistributedDataParallel.__new__(DistributedDataParallel)
    torch.nn.Module.__init__(unfinished)
    assert living_blocks() is not None, unfinished
