"""A plan has what was required, claims what it earns, and runs: else it is refused beforehand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.zoo.opaque_jobs import kept_apart, opaque_job
from torch import nn

import memfit
from memfit import Job
from memfit.devices.catalogue import load_device
from memfit.errors import NoPlanFitsError, StrategyError
from memfit.planner.cache.recording_cache import RecordingCache
from memfit.strategies import MicroBatching
from memfit.strategies.evidence import Evidence
from memfit.strategies.plan import Plan

WIDTH, SIZE, NUM_STEPS = 16, 16, 3


def job_of(model, loss, *, batch_size: int = SIZE) -> Job:
    return Job(
        model=model,
        batch=lambda size: torch.randn(size, 8, WIDTH, dtype=torch.float64),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=batch_size,
    )


def pair_loss(left, right):
    left, right = F.normalize(left.mean(1), dim=-1), F.normalize(right.mean(1), dim=-1)
    return F.cross_entropy(left @ right.T / 0.1, torch.arange(len(left)))


class Encoder(nn.Module):
    """Two blocks of which the first is seen by hooks; the second keeps what the class says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x):
        hidden = self.first(x).tanh()
        self.keep(hidden)
        return self.second(hidden)

    def keep(self, hidden):
        """Keep nothing."""


def directly(job, batches):
    torch.manual_seed(0)
    model = job.model()
    optimizer = job.optimizer([*model.parameters()])
    for batch in batches:
        job.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def assert_runs_like_the_direct_loop(make, plan):
    job = make()
    batches = [job.batch(SIZE) for _ in range(NUM_STEPS)]
    expected = directly(make(), batches)
    torch.manual_seed(0)
    with memfit.start(job, plan) as run:
        for batch in batches:
            run.step(batch)
        for name, parameter in run.model.named_parameters():
            torch.testing.assert_close(parameter, expected[name], rtol=1e-9, atol=1e-12)


# --- What is required is there, or the reason why it cannot be ---


def test_required_pieces_of_which_no_size_can_be_run_are_an_error_with_the_reason():
    job = Job(
        model=lambda: nn.Linear(WIDTH, WIDTH),
        batch=lambda size: torch.randn(size, WIDTH),
        loss=lambda model, batch: (batch @ model.weight.T).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=8,
    )
    required = {"require": ["cached-gradients"], "allow": ["unproved"], "prove": False}
    with pytest.raises(StrategyError, match="no call of a module could be run in pieces") as found:
        memfit.plan(job, budget="1GiB", **required)
    assert found.value.strategy == "cached-gradients"


def test_required_strategies_that_exclude_each_other_are_an_error():
    with pytest.raises(StrategyError, match="cached-gradients, which is required as well"):
        memfit.plan(opaque_job(torch.sin), require=["micro-batching", "cached-gradients"])


@pytest.mark.slow
def test_to_require_pieces_is_not_to_allow_them_unproved():
    job, wanted = opaque_job(kept_apart), {"require": ["micro-batching"], "prove": False}
    with pytest.raises(StrategyError, match=r"could not be proved: .*--allow unproved"):
        memfit.plan(job, **wanted)
    assert memfit.plan(job, **wanted, allow=["unproved"]).numerics == "unproved"


# --- What is claimed is the same wherever it is said ---


def coupled_job() -> Job:
    """Return a job with a loss over pairs, and a representation that nobody can follow."""

    class Opaque(nn.Linear):
        def forward(self, x):
            return kept_apart(super().forward(x))

    def loss(model, batch):
        left, right = (F.normalize(model(each), dim=-1) for each in batch)
        return F.cross_entropy(left @ right.T, torch.arange(len(left)))

    return Job(
        model=lambda: Opaque(WIDTH, WIDTH),
        batch=lambda size: (torch.randn(size, WIDTH), torch.randn(size, WIDTH)),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=8,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "name"),
    [(lambda: opaque_job(kept_apart), "micro-batching"), (coupled_job, "cached-gradients")],
    ids=["micro-batching", "cached-gradients"],
)
def test_what_a_real_batch_has_shown_is_claimed_wherever_the_plan_is_asked(make, name, tmp_path):
    plan = memfit.plan(make(), require=[name], prove=True)
    assert (plan.numerics, plan.proof) == ("exact", Evidence.TRIAL)
    plan.save(tmp_path / "plan.yaml")
    loaded = Plan.load(tmp_path / "plan.yaml")
    assert memfit.predict(make(), plan=loaded).numerics == "exact"
    assert memfit.measure(make(), plan=loaded).numerics == "exact"
    found = memfit.verify(make(), loaded)
    assert (found.numerics, found.earned) == ("exact", "exact")
    text = (tmp_path / "plan.yaml").read_text()
    (tmp_path / "changed.yaml").write_text(
        text.replace("micro_batch_size: 4", "micro_batch_size: 2")
    )
    assert Plan.load(tmp_path / "changed.yaml").proof is None
    by_hand = Plan(strategies=plan.strategies)
    assert memfit.verify(make(), by_hand).numerics == "unproved"


@pytest.mark.slow
def test_pieces_that_an_earlier_call_was_allowed_are_not_taken_from_its_recordings(tmp_path):
    job = opaque_job(kept_apart, batch_size=64)
    others = ["tiling", "activation-checkpointing", "optimizer-in-backward"]
    budget = int(0.6 * memfit.predict(job).peak_allocated_bytes)

    def planned(**wanted):
        cache = RecordingCache(tmp_path, "a job", load_device("cpu"))
        with cache.used():
            return memfit.plan(job, "cpu", budget, forbid=others, cache=cache, **wanted)

    assert planned(prove=False, allow=["unproved"]).numerics == "unproved"
    with pytest.raises(NoPlanFitsError, match="could not be proved") as found:
        planned(prove=False)
    assert not any("micro-batching" in each for each in found.value.strategies)
    tried = planned(prove=True)
    assert (tried.numerics, tried.prediction.numerics) == ("exact", "exact")


# --- What a plan cannot do is known when it is made ---


def kept_by_a_hook() -> Job:
    kept = {}

    def model():
        built = Encoder()
        built.first.register_forward_hook(lambda _module, _args, out: kept.update(f=out))
        return built

    return job_of(model, lambda model, batch: pair_loss(model(batch), kept["f"]))


def kept_on_the_module() -> Job:
    class Keeping(Encoder):
        def keep(self, hidden):
            self.load = hidden.softmax(-1).mean((0, 1))

    def loss(model, batch):
        return pair_loss(model(batch), batch) + model.load.square().sum()

    return job_of(Keeping, loss)


def kept_and_not_read() -> Job:
    class Keeping(Encoder):
        def keep(self, hidden):
            self.last = hidden

    return job_of(Keeping, lambda model, batch: pair_loss(model(batch), batch))


def averaged_in_a_tensor() -> Job:
    class Averaging(Encoder):
        def __init__(self):
            super().__init__()
            self.mean = torch.zeros(WIDTH, dtype=torch.float64)

        def keep(self, hidden):
            with torch.no_grad():
                self.mean.lerp_(hidden.mean((0, 1)), 0.1)

    return job_of(
        Averaging, lambda model, batch: pair_loss(model(batch) + model.mean.clone(), batch)
    )


def counted_by_samples() -> Job:
    class Counting(Encoder):
        num_samples = 0

        def keep(self, hidden):
            self.num_samples += len(hidden)

    return job_of(Counting, lambda model, batch: pair_loss(model(batch), batch))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        kept_by_a_hook,
        kept_on_the_module,
        kept_and_not_read,
        averaged_in_a_tensor,
        counted_by_samples,
    ],
)
def test_representations_that_leave_something_of_their_rows_are_not_cut(make):
    plan = memfit.plan(make(), require=["cached-gradients"])
    assert plan.numerics == "exact"
    assert_runs_like_the_direct_loop(make, plan)


@pytest.mark.slow
def test_representations_that_count_their_calls_are_cut():
    class Counting(Encoder):
        num_calls = 0

        def keep(self, hidden):
            self.num_calls += 1

    def make():
        return job_of(Counting, lambda model, batch: pair_loss(model(batch), batch))

    plan = memfit.plan(make(), require=["cached-gradients"])
    assert any("the model" in each or "proved" in each for each in plan.reasons)
    assert_runs_like_the_direct_loop(make, plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["micro-batching", "unproved"])
def test_pieces_whose_first_step_would_end_in_an_error_are_not_allowed_by_name_either(name):
    last = {"loss": 1.0}

    def loss(model, batch):
        found = (model(batch) - batch).square().mean()
        last["loss"] = float(found.detach())
        return found

    job = job_of(Encoder, loss)
    with pytest.raises(StrategyError, match=r"leaves loss\.last\['loss'\] in another state"):
        memfit.plan(job, require=["micro-batching"], allow=[name])
    plan = Plan(strategies=(MicroBatching(micro_batch_size=8),))
    with (
        memfit.start(job, plan) as run,
        pytest.raises(memfit.MemfitError, match=r"loss\.last\['loss'\]"),
    ):
        run.step(job.batch(SIZE))
