"""A run takes what was predicted in each of its steps, guarded or not; a first trial fits as well."""

from __future__ import annotations

import gc
import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.zoo.opaque_jobs import kept_apart, opaque_job
from tests.zoo.small_jobs import mean_square_job
from torch import nn

import memfit
from memfit.live_state.disk_copies import DiskCopies
from memfit.observe.allocator_events import GrowthWatch
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.plan import Plan

WIDTH = 64
NUM_STEPS = 12


class Table(nn.Module):
    """Holds a large buffer, and writes to it in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.zeros(256, 1024))

    def forward(self, inputs):
        with torch.no_grad():
            self.table.add_(1.0)
        return self.layer(inputs) + self.table[0, :WIDTH]


class Noise(nn.Module):
    """Draws from torch's generator and from one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.generator = torch.Generator()

    def forward(self, inputs):
        own = torch.randn(WIDTH, generator=self.generator)
        return self.layer(inputs) + torch.randn(WIDTH) + own


class Averages(torch.optim.Optimizer):
    """Keeps averages beside its states."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": torch.tensor(0.1)})
        self.averages: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure=None) -> None:
        del closure
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                average = self.averages.setdefault(number, torch.zeros_like(parameter))
                average.mul_(0.9).add_(parameter.grad)
                parameter.sub_(average * group["lr"])


JOBS = {
    "a large buffer": mean_square_job(Table, WIDTH),
    "statistics of batches": mean_square_job(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), WIDTH
    ),
    "random draws": mean_square_job(Noise, WIDTH),
    "an optimizer in Python": mean_square_job(
        lambda: nn.Linear(WIDTH, WIDTH), WIDTH, optimizer=Averages
    ),
    "a very small model": mean_square_job(lambda: nn.Linear(4, 4), 4),
}


def peaks_of(job, plan, *, guard: bool, num_steps: int = NUM_STEPS) -> list[int]:
    """Return the highest living bytes within each step of a run that begins inside."""
    watch, ends = GrowthWatch(), []
    gc.collect()  # what earlier tests have left would end inside
    watch.begin()
    try:
        with memfit.start(job, plan, guard=guard) as run:
            ends.append(time.time_ns())
            for _ in range(num_steps):
                run.step(job.batch(job.batch_size))
                ends.append(time.time_ns())
    finally:
        watch.end()
    times, deltas = zip(*((e.time_ns, e.num_bytes) for e in watch.events()), strict=True)
    living = np.cumsum(deltas)
    at = np.searchsorted(times, ends)
    return [int(living[first:last].max()) for first, last in itertools.pairwise(at)]


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
def test_every_step_stays_within_the_prediction(job, guard):
    predicted = memfit.predict(job).peak_allocated_bytes
    peaks = peaks_of(job, Plan(), guard=guard)
    assert max(peaks) == predicted


class Counter(nn.Module):
    """Counts its calls, so that it takes a trial to tell whether pieces keep the results."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        return self.layer(inputs)


@pytest.mark.slow
@pytest.mark.parametrize("guard", [False, True])
def test_the_trial_before_the_first_step_stays_within_the_prediction(guard):
    job = mean_square_job(lambda: nn.Sequential(Counter(), nn.GELU()), WIDTH, batch_size=256)
    halved = Plan(strategies=(MicroBatching(micro_batch_size=128),))
    prediction = memfit.predict(job, plan=halved)
    assert prediction.numerics == "unproved"
    with pytest.warns(memfit.MemfitWarning, match="its gradients are those of"):
        peaks = peaks_of(job, replace(halved, prediction=prediction), guard=guard, num_steps=3)
    assert max(peaks) <= prediction.peak_allocated_bytes


@pytest.mark.slow
def test_a_trial_that_may_take_more_than_the_plan_is_not_made_and_shows_nothing():
    job, plan = opaque_job(kept_apart), Plan(strategies=(MicroBatching(micro_batch_size=1),))
    plan = replace(plan, prediction=memfit.predict(job, plan=plan))
    told = []
    with memfit.start(job, plan) as run:
        run.listen(told.append)
        with pytest.warns(memfit.MemfitWarning, match="may take more memory than the plan"):
            run.step(job.batch(8))
        assert not plan.splitting.separability(run._steps.session.facts.separation).is_settled
    assert "nothing" in told[0].trial


def test_files_of_copies_are_written_over_once_nobody_holds_on_to_them():
    copies = DiskCopies()
    first = copies.of(torch.arange(6.0).reshape(2, 3))
    second = copies([torch.ones(3, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)])
    assert torch.equal(first, torch.arange(6.0).reshape(2, 3))
    assert second.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    address, part = first.data_ptr(), first[1]
    del first
    third = copies.of(torch.zeros(6))
    assert third.data_ptr() != address
    assert part.tolist() == [3.0, 4.0, 5.0]
    del part
    assert copies.of(torch.zeros(6)).data_ptr() == address


def test_copies_lie_in_memory_where_the_disk_is_full(monkeypatch):
    def no_room(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("memfit.live_state.disk_copies.tempfile.TemporaryFile", no_room)
    assert torch.equal(DiskCopies().of(torch.ones(3)), torch.ones(3))
