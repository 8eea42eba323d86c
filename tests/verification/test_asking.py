"""Asking changes nothing: jobs that return living objects find them as they were, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from tests.zoo import living_jobs
from tests.zoo.living_jobs import ALL, Living, bits_of
from tests.zoo.small_jobs import mean_square_job
from torch import nn

import memfit
from memfit import Plan
from memfit.devices.catalogue import load_device
from memfit.errors import HeldTensorError, NoPlanFitsError, RecordingError, StrategyError
from memfit.measurement.timing import time_plans
from memfit.prediction.recording import record
from memfit.separation.representations import rows_are_apart
from memfit.session.batches import find_layout
from memfit.session.stand_ins import StandIns
from memfit.strategies.batchnorm_replay import BatchNormReplay
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.optimizer_implementation import OptimizerImplementation
from memfit.verification import proof

# The others have tensors of the host in closures and attributes, which a step on a card refuses.
ON_A_CARD = [
    living_jobs.perceptron,
    living_jobs.convolutional,
    living_jobs.spectral,
    living_jobs.tied,
    living_jobs.frozen_backbone,
    living_jobs.noted,
]
# Their pieces would see or leave something else than the whole batch, so the batch stays whole.
KEPT_WHOLE = [
    living_jobs.recurrent,
    living_jobs.quantised,
    living_jobs.hooked,
    living_jobs.noted,
]
EACH = pytest.mark.parametrize("build", ALL, ids=lambda build: build.__name__)


def in_pieces(living: Living) -> Plan:
    has_statistics = any(isinstance(each, nn.BatchNorm2d) for each in living.model.modules())
    strategy = BatchNormReplay if has_statistics else MicroBatching
    return Plan(strategies=(strategy(micro_batch_size=3),))


def plan_for(build: Callable[[], Living], living: Living) -> Plan:
    if build in KEPT_WHOLE:
        return Plan(strategies=(OptimizerImplementation(implementation="foreach"),))
    return in_pieces(living)


@pytest.mark.slow
@EACH
def test_predicting_leaves_everything_as_it_was(build):
    living = build()
    before = bits_of(living)
    memfit.predict(living.job)
    assert bits_of(living) == before
    memfit.predict(living.job, plan=plan_for(build, living))
    assert bits_of(living) == before
    if build in ON_A_CARD:
        memfit.predict(living.job, "t4")
        assert bits_of(living) == before


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("ask", [memfit.measure, memfit.verify])
def test_measuring_and_verifying_leave_everything_as_it_was(build, ask):
    living = build()
    before = bits_of(living)
    ask(living.job, plan_for(build, living))
    assert bits_of(living) == before


@pytest.mark.slow
@pytest.mark.parametrize("build", KEPT_WHOLE, ids=lambda build: build.__name__)
@pytest.mark.parametrize("ask", [memfit.predict, memfit.measure, memfit.verify])
def test_refusing_a_plan_leaves_everything_as_it_was(build, ask):
    living = build()
    before = bits_of(living)
    with pytest.raises(StrategyError):
        ask(living.job, plan=in_pieces(living))
    assert bits_of(living) == before


@pytest.mark.slow
def test_what_pieces_put_back_is_not_given_back_to_a_living_model_early():
    def build():
        return nn.Sequential(nn.utils.spectral_norm(nn.Linear(150, 150)), nn.Linear(150, 3))

    living = living_jobs.trained(build, living_jobs.rows(150))
    before = bits_of(living)
    in_whole, pieces = memfit.predict(living.job), in_pieces(living)
    memfit.predict(living.job, plan=pieces)
    assert bits_of(living) == before
    fresh_in_whole = memfit.predict(living.fresh)
    assert in_whole.peak_allocated_bytes == fresh_in_whole.peak_allocated_bytes


@pytest.mark.slow
def test_calls_with_a_state_at_one_batch_size_alone_are_not_known_to_keep_rows_apart():
    living = living_jobs.recurrent()
    found = rows_are_apart(living.job, find_layout(living.job), "layer")
    assert not found.is_proved
    assert "as many tensors at every batch size" in found.sentence


@pytest.mark.slow
@EACH
def test_planning_leaves_everything_as_it_was(build):
    living = build()
    before = bits_of(living)
    budget = int(0.9 * memfit.predict(living.job).peak_allocated_bytes)
    with suppress(NoPlanFitsError):
        memfit.plan(living.job, budget=budget)
    assert bits_of(living) == before


@pytest.mark.slow
def test_proving_and_timing_leave_everything_as_they_were():
    living = living_jobs.spectral()
    before = bits_of(living)
    proof.verify_each(living.job)
    assert bits_of(living) == before
    time_plans(living.job, [Plan(), in_pieces(living)], load_device("cpu"), num_rounds=1)
    assert bits_of(living) == before


@pytest.mark.slow
def test_a_recording_that_fails_leaves_everything_as_it_was():
    living = living_jobs.recurrent()

    def loss(model, batch):
        value = model(batch).square()
        model.seen = value.unique()  # as many as nobody can bound
        return value.mean()

    job = replace(living.job, loss=loss)
    before = bits_of(living)
    with pytest.raises(RecordingError):
        memfit.predict(job, plan=in_pieces(living))
    assert bits_of(living) == before


@pytest.mark.slow
def test_a_recording_with_answers_leaves_everything_as_it_was():
    living = living_jobs.recurrent()

    def loss(model, batch):
        value = model(batch).square().mean()
        model.seen = value.item()
        return value

    before = bits_of(living)
    assert memfit.predict(replace(living.job, loss=loss)).answers
    assert bits_of(living) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "name"),
    [*((build, "cpu") for build in ALL), *((build, "t4") for build in ON_A_CARD)],
)
def test_living_objects_are_predicted_like_fresh_ones(build, name):
    living = build()
    device = load_device(name)
    of_living = record(living.job, device=device).steady
    of_fresh = record(living.fresh, device=device).steady
    sizes = [sorted(a.num_bytes for a in each.allocations) for each in (of_living, of_fresh)]
    assert sizes[0] == sizes[1]
    peaks = [memfit.predict(job, name).peak_allocated_bytes for job in (living.job, living.fresh)]
    assert peaks[0] == peaks[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [living_jobs.perceptron, living_jobs.spectral, living_jobs.recurrent, living_jobs.quantised],
    ids=lambda build: build.__name__,
)
def test_living_objects_are_measured_with_their_own_memory(build):
    living = build()
    measured = memfit.measure(living.job)
    assert measured.peak_allocated_bytes == memfit.predict(living.fresh).peak_allocated_bytes
    assert measured.by_category["parameters"] > 0


@pytest.mark.slow
def test_a_loss_that_uses_the_living_model_itself_is_recorded_with_it():
    living = living_jobs.perceptron()
    job = replace(living.job, loss=lambda _, batch: living.model(batch).square().mean())
    assert memfit.predict(job).by_category == memfit.predict(living.job).by_category


@pytest.mark.slow
def test_a_new_optimizer_over_a_living_model_leaves_it_as_it_was():
    living = living_jobs.hooked()
    groups = [{"params": living.model[2].parameters()}]
    job = replace(living.job, optimizer=lambda _: torch.optim.AdamW(groups))
    before = bits_of(living)
    memfit.predict(job)
    memfit.measure(job)
    assert bits_of(living) == before


@pytest.mark.slow
def test_a_model_that_is_built_once_and_kept_is_not_kept_fake():
    kept: list[nn.Module] = []

    def model():
        if not kept:
            kept.append(nn.Linear(4, 2))
        return kept[0]

    job = mean_square_job(model, 4, optimizer=living_jobs.adam)
    first = memfit.predict(job)
    assert kept == []
    assert memfit.predict(job).peak_allocated_bytes == first.peak_allocated_bytes


@pytest.mark.slow
def test_a_planned_run_trains_the_living_model_afterwards():
    living = living_jobs.hooked()
    plan = memfit.plan(living.job, budget=memfit.predict(living.job).peak_allocated_bytes)
    before = [each.detach().clone() for each in living.model.parameters()]
    with memfit.start(living.job, plan) as run:
        assert run.model is living.model
        assert run.optimizer is living.optimizer
        run.step(living.job.batch(8))
    after = living.model.parameters()
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    steps = {int(state["step"]) for state in living.optimizer.state.values()}
    assert steps == {3}


@pytest.mark.slow
def test_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    living = living_jobs.perceptron()
    memfit.predict(living.job)
    memfit.measure(living.job)
    memfit.verify(living.job, in_pieces(living))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_evaluation_mode_is_said_and_left_alone():
    living = living_jobs.convolutional()
    living.model.eval()
    (note,) = memfit.predict(living.job).notes
    assert note.startswith("the model is in eval mode: dropout and batch normalisation act as")
    plan = memfit.plan(living.job, budget="1GiB")
    assert note in plan.notes
    assert note in memfit.verify(living.job, Plan()).notes
    assert not living.model.training
    living.model.train()
    living.model[1].eval()
    assert not memfit.predict(living.job).notes
    living.model[0].eval()
    assert memfit.predict(living.job).notes[0].startswith("0 is in eval mode")


# --- Stand-ins by themselves ---


def test_stand_ins_share_memory_as_the_originals_do():
    whole = torch.arange(6.0)
    left, right = whole[:4], whole[2:]
    stand_ins = StandIns(torch.clone)
    stand_ins.take_places([("left", left), ("right", right)])
    left.mul_(10)
    assert right.tolist() == [20.0, 30.0, 4.0, 5.0]
    stand_ins.put_back()
    assert whole.tolist() == left.tolist() + right[2:].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_what_holds_on_to_a_parameter_finds_it_again():
    parameter = nn.Parameter(torch.ones(3))
    seen: list[torch.Tensor] = []
    parameter.register_hook(lambda gradient: gradient * 3)
    parameter.register_post_accumulate_grad_hook(seen.append)
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    node.register_hook(lambda *_: seen.append("node"))
    version = parameter._version
    stand_ins = StandIns(lambda memory: memory.double())
    stand_ins.take_places([("it", parameter)])
    parameter.sum().backward()
    assert parameter.dtype is parameter.grad.dtype is torch.float64
    assert parameter.grad.tolist() == [3.0, 3.0, 3.0]
    assert seen == [parameter]
    stand_ins.put_back()
    assert (parameter.grad, parameter.dtype, parameter._version) == (None, torch.float32, version)
    assert type(parameter) is nn.Parameter
    parameter.sum().backward()
    assert parameter.grad.tolist() == [3.0, 3.0, 3.0]
    assert "node" in seen


def test_a_tensor_that_torch_holds_on_to_is_refused_by_name():
    parameter = nn.Parameter(torch.ones(3))
    reference = torch._C._WeakTensorRef(parameter)
    with pytest.raises(HeldTensorError, match=r"layer\.weight of them cannot be replaced"):
        StandIns(torch.clone).take_places([("layer.weight", parameter)])
    assert type(parameter) is nn.Parameter
    assert not reference.expired()
