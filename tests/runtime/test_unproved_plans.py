"""Plans that nobody could prove are tried on the first batch; every batch is held to its proof."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from tests.runtime.guard_faults import OutOfMemoryAt
from tests.zoo.opaque_jobs import hardly_mixed, kept_apart, labelled_job, mixed, opaque_job
from torch import nn

import memfit
from memfit.errors import (
    BatchConditionError,
    MemfitWarning,
    NotSeparableError,
    OutOfMemoryAfterAllError,
    StrategyError,
)
from memfit.journal.records import UnprovedPlanEvent
from memfit.journal.sentences import event_sentence
from memfit.prediction.recording import record
from memfit.runtime.planned_steps import PlannedSteps
from memfit.runtime.run import open_plain_session
from memfit.separation import separation
from memfit.session.batches import find_layout
from memfit.strategies.base import Numerics
from memfit.strategies.evidence import Evidence
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.plan import Plan

HALVED = Plan(strategies=(MicroBatching(micro_batch_size=4),))


def parameters_of(run):
    return copy.deepcopy(dict(run.model.state_dict()))


def are_same(one, other) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.slow
def test_a_refuted_plan_is_not_started_predicted_or_measured():
    job = opaque_job(lambda x: x - x.mean(0))
    for begin in (memfit.start, memfit.measure):
        with pytest.raises(StrategyError, match=r"test_unproved_plans\.py:"):
            begin(job, HALVED)
    with pytest.raises(StrategyError, match="couples the samples"):
        memfit.predict(job, plan=HALVED)


@pytest.mark.slow
@pytest.mark.parametrize("guard", [True, False])
def test_what_could_not_be_followed_is_tried_before_the_first_step(guard):
    told = []
    job = opaque_job(kept_apart)
    assert memfit.predict(job, plan=HALVED).numerics == "unproved"
    with memfit.start(job, HALVED, guard=guard) as run:
        run.listen(told.append)
        before = parameters_of(run)
        with pytest.warns(MemfitWarning, match="could not be proved"):
            run.step(job.batch(8))
        assert not are_same(before, parameters_of(run))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run.step(job.batch(8))
    (event,) = told
    assert isinstance(event, UnprovedPlanEvent)
    assert event.step == 1
    assert "kept_apart" in event.reason
    assert "gradients are those of micro-batching(2)" in event_sentence(event)


@pytest.mark.slow
def test_a_step_after_a_trial_is_the_step_that_it_would_have_been():
    job = opaque_job(kept_apart)
    torch.manual_seed(0)
    batch = job.batch(8)
    torch.manual_seed(1)
    tried = memfit.start(job, HALVED)
    torch.manual_seed(1)
    untried = PlannedSteps(open_plain_session(job, "cpu", find_layout(job)), HALVED)
    state = torch.get_rng_state()
    with pytest.warns(MemfitWarning):
        tried.step(batch)
    assert torch.equal(torch.get_rng_state(), state)
    untried.attempt(batch)
    assert are_same(tried.model.state_dict(), untried.session.model.state_dict())


@pytest.mark.parametrize("operator", [mixed, hardly_mixed])
def test_gradients_that_depend_on_the_pieces_stop_a_run_before_its_first_update(operator):
    job = opaque_job(operator)
    with memfit.start(job, HALVED) as run:
        before = parameters_of(run)
        with pytest.raises(NotSeparableError, match=r"differs by .* \(relative") as caught:
            run.step(job.batch(8))
        assert are_same(before, parameters_of(run))
        assert all(parameter.grad is None for parameter in run.model.parameters())
    assert caught.value.exit_code == 6
    assert "micro-batching(4)" in str(caught.value)


@pytest.mark.slow
def test_pieces_of_one_sample_are_held_against_pieces_of_two():
    job = opaque_job(mixed)
    with (
        memfit.start(job, Plan(strategies=(MicroBatching(micro_batch_size=1),))) as run,
        pytest.raises(NotSeparableError, match=r"micro-batching\(2\)"),
    ):
        run.step(job.batch(8))


@pytest.mark.slow
def test_dropout_does_not_disturb_a_trial():
    job = opaque_job(kept_apart)
    dropping = replace(
        job,
        model=lambda: nn.Sequential(
            nn.Linear(16, 16), nn.Sequential(nn.Dropout(), nn.Linear(16, 16))
        ),
    )
    with memfit.start(dropping, HALVED) as run, pytest.warns(MemfitWarning, match="are those of"):
        run.step(job.batch(8))


@pytest.mark.slow
def test_a_plan_that_was_tried_when_it_was_made_starts_without_a_warning():
    job = opaque_job(kept_apart)
    tried = replace(HALVED, proof=Evidence.TRIAL)
    with memfit.start(job, tried) as run, warnings.catch_warnings():
        warnings.simplefilter("error")
        run.step(job.batch(8))


@pytest.mark.slow
def test_a_guard_goes_on_with_no_halving_that_is_not_known_to_keep_the_results():
    def loss(model, batch):
        hidden = nn.functional.linear(batch[0], model[0].weight, model[0].bias)
        return (kept_apart(hidden) - batch[1]).square().mean()

    job = replace(opaque_job(kept_apart), loss=loss)
    with (
        memfit.start(job) as run,
        OutOfMemoryAt(name="addmm", most=1),
        pytest.raises(OutOfMemoryAfterAllError, match="kept_apart"),
    ):
        run.step(job.batch(8))


@pytest.mark.slow
def test_a_guard_cuts_representations_where_the_loss_is_not_known_to_keep_samples_apart():
    job = opaque_job(kept_apart)
    with memfit.start(job) as run, OutOfMemoryAt(name="addmm", most=1):
        run.step(job.batch(8))
        assert run.plan.labels() == ("cached-gradients(4)",)


@pytest.mark.slow
def test_a_guard_halves_what_is_proved():
    job = opaque_job(torch.sin)
    with memfit.start(job) as run, OutOfMemoryAt(name="addmm", most=1):
        run.step(job.batch(8))
        assert run.plan.labels() == ("micro-batching(4)",)


# --- Batches and what their proofs take for granted ---


@pytest.mark.slow
def test_a_label_that_is_left_out_stops_a_run_before_anything_is_computed():
    job = labelled_job(ignored=0)
    assert memfit.predict(job, plan=HALVED).numerics == "exact"
    with memfit.start(job, HALVED) as run:
        run.step(job.batch(8))
        before = parameters_of(run)
        with pytest.raises(
            BatchConditionError, match=r"batch\['labels'\] holds -100 3 times"
        ) as caught:
            run.step(labelled_job(ignored=3).batch(8))
        assert "memfit.Total(sum, count)" in str(caught.value)
        assert are_same(before, parameters_of(run))
        run.step(job.batch(8))


def test_without_pieces_a_label_may_be_left_out():
    job = labelled_job(ignored=3)
    with memfit.start(job) as run:
        run.step(job.batch(8))


@pytest.mark.slow
def test_a_batch_of_another_size_is_looked_into_once(monkeypatch):
    sizes = []
    recorded = separation.record_step
    monkeypatch.setattr(
        separation,
        "record_step",
        lambda job, layout, size, **settings: (
            sizes.append(size) or recorded(job, layout, size, **settings)
        ),
    )
    job = opaque_job(torch.sin)
    with memfit.start(job, HALVED) as run:
        run.step(job.batch(8))
        sizes.clear()
        for _ in range(2):
            run.step(job.batch(7))
        assert sizes.count(7) == 1
        sizes.clear()
        run.step(job.batch(4))
        assert not sizes, "what is not cut needs no proof"


@pytest.mark.slow
def test_a_batch_whose_size_changes_the_step_is_refused():
    def loss(model, batch):
        outputs = model(batch[0])
        if len(outputs) == 7:
            outputs = outputs - outputs.mean(0)
        return (outputs - batch[1]).square().mean()

    job = replace(opaque_job(torch.sin), loss=loss)
    with memfit.start(job, HALVED) as run:
        run.step(job.batch(8))
        before = parameters_of(run)
        with pytest.raises(NotSeparableError):
            run.step(job.batch(7))
        assert are_same(before, parameters_of(run))


def test_a_plan_without_an_answer_is_never_exact():
    facts = replace(record(opaque_job(torch.sin)).facts, separation=None)
    split = MicroBatching(micro_batch_size=4)
    assert split.numerics_for(facts) is Numerics.UNPROVED
    assert split.obstacle(facts) is None
