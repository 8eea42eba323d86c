"""Pieces that keep what backward needs: the same gradients, in more memory and less time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.strategies.test_cached_gradients import COUPLED, assert_same, doubled, step_of
from tests.strategies.test_cached_gradients_runs import (
    LOSSES,
    coupled,
    in_batch_negatives,
    out_of_memory_in_the_third,
    trained,
)
from tests.strategies.test_cached_gradients_runs import assert_same as assert_same_end
from tests.strategies.test_cached_gradients_together import Wide, of_both
from tests.zoo.coupled_jobs import (
    EXACT,
    Encoder,
    assert_exact,
    contrasted,
    info_nce,
    job_of,
    two_views,
)
from tests.zoo.planned_jobs import evaluator_of
from torch import nn

import memfit
from memfit import Plan
from memfit.errors import StrategyError
from memfit.runtime.ladder import smaller_plans
from memfit.strategies import build_strategy
from memfit.strategies.cached_gradients import CachedGradients


def keeping(size: int, kept: int) -> Plan:
    return Plan(strategies=(CachedGradients(micro_batch_size=size, kept_pieces=kept),))


@pytest.mark.slow
@pytest.mark.parametrize("kept", [1, 2, 99])
@pytest.mark.parametrize("job", COUPLED.values(), ids=COUPLED.keys())
def test_gradients_are_those_of_the_whole_batch(job, kept):
    found = memfit.verify(job, keeping(4, kept))
    assert found.numerics == found.earned == "exact"
    assert found.largest_error <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("kept", [1, 3, 4])
def test_with_dropout_they_are_those_of_one_pass_with_the_same_masks(kept):
    def reference(model, batch):
        rows = torch.cat(batch).split(5)
        return info_nce(*torch.cat([model(piece) for piece in rows]).chunk(2))

    def planned(model, batch):
        return info_nce(*model(torch.cat(batch)).chunk(2))

    batch = tuple(part.double() for part in two_views(9))
    model = doubled(lambda: Encoder(rate=0.4))
    cut = step_of(job_of(model, planned, two_views, 9), keeping(5, kept), batch)
    expected = step_of(job_of(model, reference, two_views, 9), Plan(), batch)
    assert_same(cut, expected, 1e-12)


@pytest.mark.slow
def test_a_power_iteration_is_taken_once_or_the_step_is_refused():
    """What a kept piece holds of a buffer that the next one changes is never used in silence."""

    def model():
        made = Encoder()
        nn.utils.parametrizations.spectral_norm(made.first)
        return made

    assert_exact(job_of(model), keeping(4, 2))


@pytest.mark.slow
def test_the_predicted_peak_is_the_measured_one_and_grows_with_every_piece_from_the_second():
    job = job_of(Wide, of_both, two_views, 512)
    predicted = []
    for kept in (0, 1, 2, 3, 4):
        predicted.append(memfit.predict(job, plan=keeping(32, kept)).peak_allocated_bytes)
        measured = memfit.measure(job, keeping(32, kept)).peak_allocated_bytes
        assert predicted[-1] == pytest.approx(measured, rel=1e-3, abs=64)
    assert predicted[1] == pytest.approx(predicted[0], rel=0.1)
    second, third = predicted[3] - predicted[2], predicted[4] - predicted[3]
    assert second == pytest.approx(third, rel=0.05)
    assert second > 0.1 * predicted[0]


@pytest.mark.slow
@pytest.mark.parametrize("in_short", [False, True])
def test_less_is_run_again(in_short):
    """In short few of the pieces are recorded, and the time of the others is estimated."""
    evaluator = evaluator_of(job_of(Wide, contrasted, two_views, 1024), may_recompute=False)
    evaluated = evaluator.in_short if in_short else evaluator.in_full
    seconds = {}
    for kept in (0, 16, 32):
        cut = CachedGradients(micro_batch_size=32, kept_pieces=kept)
        seconds[kept] = evaluated((cut,)).prediction.step_seconds
    assert seconds[32] < 0.9 * seconds[0]
    tolerance = 0.08 if in_short else 0.02
    assert seconds[16] == pytest.approx((seconds[32] + seconds[0]) / 2, rel=tolerance)
    if in_short:
        # What belongs to the loss is counted with every piece that was left out.
        whole = evaluator._whole((CachedGradients(micro_batch_size=32, kept_pieces=16),))
        assert whole.prediction.step_seconds < seconds[16] < 2 * whole.prediction.step_seconds


@pytest.mark.slow
def test_the_planner_fills_its_budget():
    job = coupled(in_batch_negatives, batch_size=512)
    budget_bytes = int(0.65 * memfit.predict(job).peak_allocated_bytes)
    plan = memfit.plan(job, budget=budget_bytes, require=("cached-gradients",))
    (cut,) = (s for s in plan.strategies if isinstance(s, CachedGradients))
    assert cut.kept_pieces
    others = tuple(s for s in plan.strategies if s is not cut)
    bare = memfit.predict(job, plan=Plan(strategies=(*others, replace(cut, kept_pieces=0))))
    assert plan.prediction.step_seconds < 0.95 * bare.step_seconds
    assert bare.peak_allocated_bytes < plan.prediction.peak_allocated_bytes <= budget_bytes
    with memfit.start(job, plan) as run:
        trained(run, job)
        assert run.measured_peak_bytes <= budget_bytes


@pytest.mark.slow
@LOSSES
@pytest.mark.parametrize("share", [0.2, 0.6, 0.9])
def test_out_of_memory_goes_on_with_smaller_pieces(loss, share):
    job = coupled(loss)
    with memfit.start(job, keeping(8, 2), guard=True) as run:

        def smaller_from_the_third_step(number):
            if number == 2:
                run._steps.change_plan(keeping(4, 1))

        expected = trained(run, job, smaller_from_the_third_step)
    with memfit.start(job, keeping(8, 2), guard=True) as run:
        found = trained(run, job, out_of_memory_in_the_third(run, share))
        (event,) = run.events
        assert event.next_plan == ("cached-gradients(micro_batch_size=4, kept_pieces=1)",)
    assert_same_end(found, expected)


@pytest.mark.slow
def test_the_rungs_below_keep_no_more_than_one_piece():
    with memfit.start(coupled(in_batch_negatives), keeping(8, 5)) as run:
        rungs = [rung.strategies for rung in smaller_plans(run.plan, run._steps.session)]
    assert rungs == [keeping(size, 1).strategies for size in (4, 2, 1)]


def test_settings_are_written_and_checked():
    plain = build_strategy("cached-gradients", {"micro_batch_size": 4})
    assert plain.label() == "cached-gradients(4)"
    kept = build_strategy("cached-gradients", {"micro_batch_size": 4, "kept_pieces": 2})
    assert kept.label() == "cached-gradients(micro_batch_size=4, kept_pieces=2)"
    with pytest.raises(StrategyError, match="kept_pieces must be at least 0, not -1"):
        build_strategy("cached-gradients", {"micro_batch_size": 4, "kept_pieces": -1})
