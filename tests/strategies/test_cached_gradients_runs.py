"""Whole runs under cached gradients: planned, guarded, out of memory in mid-step, and verified."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.conformance.entries_cached_gradients import contrast_by_label
from tests.runtime.guard_faults import OutOfMemoryAt
from tests.zoo.coupled_jobs import EXACT, WIDTH, info_nce, plan_of
from tests.zoo.small_jobs import mean_square_job
from torch import nn

import memfit
from memfit import Job, Plan
from memfit.errors import OutOfMemoryAfterAllError
from memfit.runtime.ladder import smaller_plans
from memfit.strategies.cached_gradients import CachedGradients

BATCH_SIZE, NUM_STEPS = 32, 4


class Tower(nn.Module):
    """An encoder whose activations are most of what its step takes."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, WIDTH)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 32),
            nn.GELU(),
            nn.Dropout(rate),
            nn.Linear(32, 32),
            nn.LayerNorm(32),
            nn.GELU(),
            nn.Dropout(rate),
        )
        self.head = nn.Linear(32, 6)

    def forward(self, ids):
        return F.normalize(self.head(self.layers(self.embedding(ids)).mean(1)), dim=-1)


def supervised_contrastive(encode, batch):
    ids, labels = batch
    return contrast_by_label(encode(ids), labels)


def in_batch_negatives(encode, batch):
    queries, documents = batch
    return info_nce(encode(queries), encode(documents))


def tokens(size: int):
    return torch.randint(0, 30, (size, 16))


BATCHES = {
    supervised_contrastive: lambda size: (tokens(size), torch.randint(0, 4, (size,))),
    in_batch_negatives: lambda size: (tokens(size), tokens(size)),
}
LOSSES = pytest.mark.parametrize("loss", BATCHES)


def coupled(loss, rate: float = 0.2, batch_size: int = BATCH_SIZE) -> Job:
    torch.manual_seed(0)
    template = Tower(rate).double()
    return Job(
        model=lambda: copy.deepcopy(template),
        batch=BATCHES[loss],
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        batch_size=batch_size,
    )


def in_one_pass(job: Job, size: int) -> Job:
    """Return a job that runs pieces one after the other, and keeps all that backward needs."""

    def loss(model, batch):
        def encode(ids):
            return torch.cat([model(piece) for piece in ids.split(size)])

        return job.loss(encode, batch)

    return replace(job, loss=loss)


def trained(run, job: Job, before_step=lambda number: None) -> list[torch.Tensor]:
    """Take some steps; return the losses and what the run ends with."""
    torch.manual_seed(2)
    batches = [job.batch(job.batch_size) for _ in range(NUM_STEPS)]
    torch.manual_seed(3)
    losses = []
    for number, batch in enumerate(batches):
        before_step(number)
        losses.append(run.step(batch).loss)
    end = [value.detach().clone() for value in run.model.state_dict().values()]
    return [*map(torch.as_tensor, losses), *end, torch.get_rng_state().double()]


def assert_same(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm()) <= EXACT * max(1.0, float(other.norm()))


@pytest.mark.slow
@LOSSES
def test_a_budget_that_only_it_fits_is_planned_and_trains_as_the_whole_batch_would(loss):
    job = coupled(loss, batch_size=64)
    budget_bytes = int(0.2 * memfit.predict(job).peak_allocated_bytes)
    plan = memfit.plan(job, budget=budget_bytes)
    (cut,) = (s for s in plan.strategies if isinstance(s, CachedGradients))
    with memfit.start(job, plan) as run:
        found = trained(run, job)
        assert run.measured_peak_bytes <= budget_bytes
    with memfit.start(in_one_pass(job, cut.micro_batch_size), Plan()) as run:
        assert_same(found, trained(run, job))


@pytest.mark.slow
@LOSSES
def test_a_plan_is_verified(loss):
    found = memfit.verify(coupled(loss), plan_of(5))
    assert found.keeps_promise
    assert found.earned == "same-in-law"
    assert found.deterministic_error <= EXACT
    exact = memfit.verify(coupled(loss, rate=0.0), plan_of(5))
    assert exact.earned == "exact"
    assert exact.largest_error <= EXACT


@pytest.mark.slow
@LOSSES
@pytest.mark.parametrize("share", [0.1, 0.4, 0.7, 0.95])
def test_out_of_memory_in_mid_step_goes_on_with_smaller_pieces(loss, share):
    """The step comes out as if it had begun with the smaller pieces, draws included."""
    job = coupled(loss)
    with memfit.start(job, plan_of(8), guard=True) as run:

        def smaller_from_the_third_step(number):
            if number == 2:
                run._steps.change_plan(plan_of(4))

        expected = trained(run, job, smaller_from_the_third_step)
    with memfit.start(job, plan_of(8), guard=True) as run:
        found = trained(run, job, out_of_memory_in_the_third(run, share))
        (event,) = run.events
        assert event.step == 3
        assert event.next_plan == ("cached-gradients(4)",)
    assert_same(found, expected)


def out_of_memory_in_the_third(run, share: float):
    """Have one operator of the third step fail; the second one counts them."""
    attempt = run._steps.attempt
    counted = OutOfMemoryAt()

    def attempted(*args):
        run._steps.attempt = attempt
        mode = counted if not counted.seen else OutOfMemoryAt(int(share * len(counted.seen)))
        with mode:
            return attempt(*args)

    def before_step(number):
        if number in (1, 2):
            run._steps.attempt = attempted

    return before_step


@pytest.mark.slow
@LOSSES
def test_smaller_pieces_are_the_rungs_below_and_micro_batches_never(loss):
    for plan, sizes in ((plan_of(8), [4, 2, 1]), (Plan(), [16, 8, 4, 2, 1])):
        with memfit.start(coupled(loss), plan) as run:
            rungs = [rung.strategies for rung in smaller_plans(run.plan, run._steps.session)]
        assert rungs == [(CachedGradients(micro_batch_size=size),) for size in sizes]


def test_a_named_representation_stays_named_on_the_way_down():
    with memfit.start(coupled(in_batch_negatives), plan_of(8, "layers")) as run:
        rungs = [rung.strategies for rung in smaller_plans(run.plan, run._steps.session)]
    named = [CachedGradients(micro_batch_size=n, representations=("layers",)) for n in (4, 2, 1)]
    assert rungs == [(each,) for each in named]


class Scores(nn.Module):
    """Holds all samples against one another in its only layer, so nothing can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH, dtype=torch.float64))

    def forward(self, x):
        return ((x @ self.weight) @ x.T).logsumexp(1).mean()


@pytest.mark.slow
def test_a_coupled_loss_without_representations_has_no_rungs():
    job = mean_square_job(
        Scores,
        WIDTH,
        batch_size=BATCH_SIZE,
        loss=lambda model, batch: model(batch),
        dtype=torch.float64,
    )
    with memfit.start(job, Plan(), guard=True) as run:
        before = run.model.weight.detach().clone()
        fault = OutOfMemoryAt(name="logsumexp")
        with fault, pytest.raises(OutOfMemoryAfterAllError, match="couples the samples"):
            run.step(job.batch(BATCH_SIZE))
        assert fault.num_raised == 1
        assert torch.equal(run.model.weight, before)


@pytest.mark.slow
def test_draws_of_the_loss_alone_change_nothing():
    def noisy(encode, batch):
        reached = encode(batch[0])
        return supervised_contrastive(lambda _: reached + 0.01 * torch.randn_like(reached), batch)

    job = replace(coupled(supervised_contrastive, 0.0, 64), loss=noisy)
    budget_bytes = int(0.2 * memfit.predict(job).peak_allocated_bytes)
    plan = memfit.plan(job, budget=budget_bytes)
    assert any(isinstance(each, CachedGradients) for each in plan.strategies)
    found = memfit.verify(job, plan)
    assert (plan.numerics, found.numerics, found.earned) == ("exact",) * 3
