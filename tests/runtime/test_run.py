"""A Run runs the same steps as a loop written by hand, and its state can be kept."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit import Job, Plan, Total
from memfit.errors import DeviceUnavailableError, StrategyError
from memfit.runtime.run import open_plain_session, unguarded_run
from memfit.session.batches import find_layout
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.batchnorm_replay import BatchNormReplay
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.optimizer_implementation import OptimizerImplementation
from memfit.trace.events import Phase


def build_job(loss=None, *, clip: float | None = None, rate: float = 0.2) -> Job:
    def mean_loss(model, batch):
        inputs, targets = batch
        return F.cross_entropy(model(inputs), targets)

    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(rate)) for _ in range(3)]
    template = nn.Sequential(*blocks, nn.Linear(8, 3))
    return Job(
        model=lambda: copy.deepcopy(template),
        batch=lambda size: (torch.randn(size, 8), torch.randint(0, 3, (size,))),
        loss=loss or mean_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
        batch_size=10,
        clip_grad_norm=clip,
    )


def total_loss(model, batch):
    """Count two of three classes, so that counts differ from samples."""
    inputs, targets = batch
    counted = targets > 0
    losses = F.cross_entropy(model(inputs), targets, reduction="none")
    return Total((losses * counted).sum(), counted.sum())


def batches_of(job, sizes=(10, 10, 10, 10)) -> list:
    return [job.batch(size) for size in sizes]


def steps_by_hand(job, batches):
    """Train as everyone does; return the model, its losses and its optimizer."""
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = job.loss(model, batch)
        if isinstance(loss, Total):
            loss = loss.sum / loss.count
        loss.backward()
        if job.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip_grad_norm)
        optimizer.step()
        losses.append(loss.detach())
    return model, losses, optimizer


def steps_of_run(job, batches, *strategies):
    run = memfit.start(job, Plan(strategies=strategies))
    return run, [run.step(batch).loss for batch in batches]


def largest_difference(first, second) -> float:
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("loss", [None, total_loss], ids=["mean", "total"])
@pytest.mark.parametrize("clip", [None, 0.05], ids=["unclipped", "clipped"])
def test_a_plain_run_equals_a_loop_by_hand_bit_for_bit(loss, clip):
    job = build_job(loss, clip=clip)
    batches = batches_of(job)
    torch.manual_seed(3)
    model, losses, _ = steps_by_hand(job, batches)
    torch.manual_seed(3)
    run, found = steps_of_run(job, batches)
    assert [float(loss) for loss in found] == [float(loss) for loss in losses]
    assert largest_difference(run.model, model) == 0.0
    assert largest_difference(run.model, job.model()) > 0.01, "the steps changed something"


def test_a_clipped_step_is_no_longer_than_its_bound():
    job = replace(
        build_job(clip=0.001, rate=0.0),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    )
    run, _ = steps_of_run(job, batches_of(job)[:1])
    pairs = zip(run.model.parameters(), job.model().parameters(), strict=True)
    squares = [float((after - before).detach().square().sum()) for after, before in pairs]
    assert sum(squares) ** 0.5 == pytest.approx(0.001, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [None, total_loss], ids=["mean", "total"])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 4, 5])
def test_partial_last_batches_are_exact_under_micro_batches(loss, micro_batch_size):
    job = build_job(loss, clip=0.1, rate=0.0)
    template = job.model().double()
    # Adam divides a gradient by its size, and makes rounding in one that is nearly zero large.
    sgd = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    job = replace(job, model=lambda: copy.deepcopy(template), optimizer=sgd)
    batches = [(x.double(), y) for x, y in batches_of(job, (10, 10, 7, 2))]
    for _, targets in batches:
        targets[0] = 1  # of none that counts, the mean is not a number
    model, losses, _ = steps_by_hand(job, batches)
    run, found = steps_of_run(job, batches, MicroBatching(micro_batch_size=micro_batch_size))
    assert [float(loss) for loss in found] == pytest.approx([float(x) for x in losses], rel=1e-12)
    assert largest_difference(run.model, model) < 1e-9


@pytest.mark.slow
def test_partial_last_batches_are_exact_under_replay():
    torch.manual_seed(1)
    template = nn.Sequential(
        nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)
    ).double()
    job = replace(build_job(), model=lambda: copy.deepcopy(template))
    job = replace(job, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    batches = [(x.double(), y) for x, y in batches_of(job, (10, 7, 10, 4))]
    model, _, _ = steps_by_hand(job, batches)
    run, _ = steps_of_run(job, batches, BatchNormReplay(micro_batch_size=4))
    assert largest_difference(run.model, model) < 1e-9
    for (name, expected), (_, found) in zip(
        model.named_buffers(), run.model.named_buffers(), strict=True
    ):
        assert torch.allclose(found, expected, rtol=1e-10), name


@pytest.mark.slow
def test_a_step_tells_its_loss_samples_time_and_peaks():
    job = build_job()
    plan = memfit.plan(job, budget="1MiB")
    run = memfit.start(job, plan)
    result = run.step(job.batch(7))
    assert result.num_samples == 7
    assert result.loss.dim() == 0
    assert not result.loss.requires_grad
    assert result.step_seconds > 0
    assert result.predicted_peak_bytes == plan.prediction.peak_allocated_bytes
    assert 0 < result.measured_peak_bytes == run.measured_peak_bytes
    assert memfit.start(job).step(job.batch(7)).predicted_peak_bytes is None
    assert run.num_steps == 1


@pytest.mark.slow
def test_the_measured_peak_of_a_steady_step_is_the_predicted_one():
    job = build_job()
    run = memfit.start(job)
    readings = [run.step(job.batch(10)).measured_peak_bytes for _ in range(3)]
    predicted = memfit.predict(job)
    assert readings[0] == pytest.approx(predicted.first_step_peak_bytes, rel=0.05)
    assert readings[2] == pytest.approx(predicted.peak_allocated_bytes, rel=0.01)


def test_gradients_are_gone_after_a_step():
    job = build_job()
    run = memfit.start(job)
    run.step(job.batch(10))
    assert [parameter.grad for parameter in run.model.parameters()] == [None] * 8


@pytest.mark.slow
def test_a_step_that_fails_leaves_no_gradients_for_the_next_one():
    """Running out of memory in the second micro-batch must not count the first one twice."""
    job = build_job(rate=0.0)
    is_failing = [False, True]
    batch = job.batch(10)
    run = memfit.start(job, Plan(strategies=(MicroBatching(micro_batch_size=5),)), guard=False)
    session = run._steps.session

    def backward(loss):
        if is_failing and is_failing.pop(0):
            raise torch.OutOfMemoryError
        loss.backward()

    session.backward = backward
    with pytest.raises(torch.OutOfMemoryError):
        run.step(batch)
    run.step(batch)
    clean, _ = steps_of_run(job, [batch], MicroBatching(micro_batch_size=5))
    assert largest_difference(run.model, clean.model) == 0.0
    assert run.num_steps == 1


@pytest.mark.slow
def test_phases_are_told_in_order():
    job = build_job()
    told: list[Phase] = []
    session = open_plain_session(job, "cpu", find_layout(job))
    plan = Plan(strategies=(MicroBatching(micro_batch_size=5),))
    unguarded_run(session, plan, phase_listener=told.append).step(job.batch(10))
    piece = [Phase.FORWARD, Phase.BACKWARD]
    assert told == [Phase.FORWARD, *piece, *piece, Phase.OPTIMIZER]


# --- State ---


PLANS = {
    "plain": (),
    "checkpointed": (ActivationCheckpointing(),),
    "fused": (OptimizerImplementation(implementation="fused"),),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_training_goes_on_from_a_kept_state_bit_for_bit(name, tmp_path):
    job = build_job()
    batches = batches_of(job)
    torch.manual_seed(5)
    whole, losses = steps_of_run(job, batches, *PLANS[name])
    torch.manual_seed(5)
    first, _ = steps_of_run(job, batches[:2], *PLANS[name])
    torch.save(first.state_dict(), tmp_path / "state.pt")
    random_state = torch.get_rng_state()
    second = memfit.start(job, Plan(strategies=PLANS[name]))
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert second.num_steps == 2
    torch.set_rng_state(random_state)
    found = [second.step(batch).loss for batch in batches[2:]]
    assert [float(loss) for loss in found] == [float(loss) for loss in losses[2:]]
    assert largest_difference(second.model, whole.model) == 0.0
    assert second.num_steps == whole.num_steps == 4


def test_a_scalar_of_an_optimizer_keeps_its_type_in_a_checkpoint():
    """NAdam's product of momenta is float32, and torch gives it the type of its parameter."""
    made = build_job()
    job = replace(
        made,
        model=lambda: made.model().double(),
        batch=lambda size: (torch.randn(size, 8).double(), torch.randint(0, 3, (size,))),
        optimizer=lambda parameters: torch.optim.NAdam(parameters),
    )
    with memfit.start(job) as run:
        run.step(job.batch(10))
        kept = copy.deepcopy(run.state_dict())
    with memfit.start(job) as other:
        other.load_state_dict(kept)
        found = other.optimizer.state_dict()["state"]
    for number, wanted in kept["optimizer"]["state"].items():
        assert {n: v.dtype for n, v in found[number].items()} == {
            n: v.dtype for n, v in wanted.items()
        }
    assert found[0]["mu_product"].dtype == torch.float32


@pytest.mark.slow
def test_the_state_holds_no_trace_of_the_plan_in_the_names_of_weights():
    job = build_job()
    plain, _ = steps_of_run(job, [])
    planned, _ = steps_of_run(job, [], ActivationCheckpointing(), MicroBatching(micro_batch_size=2))
    assert plain.state_dict()["model"].keys() == planned.state_dict()["model"].keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded", "flags"),
    [
        ("fused", "plain", {"fused": None, "foreach": None}),
        ("plain", "fused", {"fused": True, "foreach": False}),
        ("fused", "fused", {"fused": True, "foreach": False}),
    ],
)
def test_loading_a_state_keeps_the_plan_of_this_run(saved, loaded, flags):
    job = build_job()
    earlier, _ = steps_of_run(job, batches_of(job), *PLANS[saved])
    run = memfit.start(job, Plan(strategies=PLANS[loaded]))
    run.load_state_dict(earlier.state_dict())
    (group,) = run.optimizer.param_groups
    assert {flag: group[flag] for flag in flags} == flags
    run.step(job.batch(10))


def test_loading_a_state_keeps_blocks_checkpointed():
    job = build_job()
    run, _ = steps_of_run(job, [], ActivationCheckpointing())
    run.load_state_dict(steps_of_run(job, batches_of(job))[0].state_dict())
    assert "forward" in vars(run.model[0])
    run.close()
    assert "forward" not in vars(run.model[0])


def test_a_state_that_does_not_fit_leaves_the_plan_in_place():
    job = build_job()
    run, _ = steps_of_run(job, [], ActivationCheckpointing())
    with pytest.raises(KeyError):
        run.load_state_dict({"model": run.model.state_dict()})
    assert "forward" in vars(run.model[0])


def test_closing_twice_is_closing_once():
    run, _ = steps_of_run(build_job(), [], ActivationCheckpointing())
    run.close()
    run.close()
    assert "forward" not in vars(run.model[0])


# --- What cannot be started ---


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
@pytest.mark.parametrize("act", [memfit.start, memfit.measure], ids=lambda act: act.__name__)
def test_a_device_that_is_not_here_is_named(act):
    with pytest.raises(DeviceUnavailableError, match="cuda:1 is not in this machine"):
        act(build_job(), device="cuda:1")


def test_a_plan_with_strategies_that_conflict_is_refused():
    template = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2)))
    job = replace(build_job(), model=lambda: copy.deepcopy(template))
    plan = Plan(strategies=(ActivationCheckpointing(), BatchNormReplay(micro_batch_size=2)))
    with pytest.raises(StrategyError, match="cannot be combined"):
        memfit.start(job, plan)


@pytest.mark.parametrize(
    ("strategies", "num_calls"),
    [((), 8), pytest.param((MicroBatching(micro_batch_size=5),), 11, marks=pytest.mark.slow)],
    ids=["plain", "micro-batching"],
)
def test_few_calls_lie_between_a_step_and_the_jobs_loss(strategies, num_calls):
    calls = []

    def loss(model, batch):
        frame = sys._getframe(1)
        calls.clear()
        while frame is not None and "Run.step" not in calls:
            calls.append(frame.f_code.co_qualname)
            frame = frame.f_back
        return F.cross_entropy(model(batch[0]), batch[1])

    steps_of_run(build_job(loss), batches_of(build_job(), (10,)), *strategies)
    assert len(calls) <= num_calls, calls
