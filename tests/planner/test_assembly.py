"""What is told around a chosen plan: the trade, safer plans, approximations and remedies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.zoo import planned_jobs as planner_jobs
from tests.zoo.small_jobs import mean_square_job

import memfit
from memfit import Job, Plan
from memfit.errors import StrategyError
from memfit.figures import ParetoPoint
from memfit.planner.result import assembly
from memfit.planner.result.front import pareto
from memfit.prediction import recording
from memfit.prediction.recording import record
from memfit.strategies import CATALOGUE, build_strategy

# --- Memory against time ---


def point(peak_bytes: int, seconds: float, *, is_recorded: bool = True, is_chosen: bool = False):
    return ParetoPoint(
        strategies=(f"{peak_bytes}, {seconds}, {is_recorded}",),
        peak_bytes=peak_bytes,
        step_seconds=seconds,
        is_recorded=is_recorded,
        is_chosen=is_chosen,
    )


def estimate(peak_bytes: int, seconds: float):
    return point(peak_bytes, seconds, is_recorded=False)


FAST, SMALL = point(1000, 1.0), point(500, 2.0)


def test_an_estimate_hides_nothing_that_was_recorded():
    optimistic = estimate(400, 0.5)
    assert pareto([FAST, SMALL, optimistic]) == (optimistic, FAST, SMALL)


@pytest.mark.parametrize(
    "near", [estimate(1100, 1.1), estimate(970, 1.3), estimate(960, 0.97), estimate(490, 1.97)]
)
def test_an_estimate_that_is_beaten_by_or_near_what_was_recorded_is_left_out(near):
    assert pareto([FAST, near, SMALL]) == (FAST, SMALL)


@pytest.mark.parametrize("beyond", [estimate(900, 1.05), estimate(1000, 0.9), estimate(400, 2.0)])
def test_an_estimate_that_is_clearly_beyond_is_kept(beyond):
    assert beyond in pareto([FAST, beyond, SMALL])


def test_the_chosen_point_is_kept_though_others_beat_it():
    chosen = point(1500, 1.5, is_chosen=True)
    assert pareto([FAST, chosen, SMALL]) == (FAST, chosen, SMALL)


@pytest.mark.slow
@given(
    st.lists(
        st.builds(
            point, st.integers(1, 50), st.integers(1, 50).map(float), is_recorded=st.booleans()
        )
    )
)
def test_every_recorded_point_that_no_recorded_one_beats_is_there(points):
    def beats(one, other):
        mine, theirs = (one.peak_bytes, one.step_seconds), (other.peak_bytes, other.step_seconds)
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))

    recorded = [p for p in points if p.is_recorded]
    wanted = [p for p in recorded if not any(beats(by, p) for by in recorded)]
    found = pareto(points)
    assert set(wanted) == {p for p in found if p.is_recorded}
    assert not any(beats(by, p) for p in found if not p.is_recorded for by in recorded)
    assert [p.step_seconds for p in found] == sorted(p.step_seconds for p in found)


# --- Jobs ---


@pytest.fixture(scope="module")
def transformer() -> Job:
    return planner_jobs.transformer(width=32, num_blocks=2, tokens=32, batch_size=4)


@pytest.fixture(scope="module")
def planned(transformer) -> Plan:
    return memfit.plan(transformer, budget="1GiB")


ROOM = ["activation-checkpointing"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "wanted",
    [
        {"require": ["micro-batching"]},
        {"require": ["micro-batching"], "forbid": ROOM},
        {"forbid": ROOM},
        {"forbid": [*ROOM, "micro-batching"]},
        {"require": ["tiling"], "forbid": ROOM},
    ],
)
def test_there_are_safer_plans_wherever_something_smaller_can_be_made(transformer, wanted):
    plan = memfit.plan(transformer, budget="1GiB", **wanted)
    assert plan.ladder
    for rung in plan.ladder:
        names = {strategy.name for strategy in rung.strategies}
        assert names >= set(wanted.get("require", []))
        assert not names & set(wanted.get("forbid", []))
    peaks = [p.prediction.peak_allocated_bytes for p in (plan, *plan.ladder)]
    assert peaks[1] <= 0.95 * peaks[0]
    assert memfit.predict(transformer, plan=plan.ladder[-1]).peak_allocated_bytes == peaks[-1]
    assert set(peaks) <= {row.peak_bytes for row in plan.considered}


@pytest.mark.slow
def test_a_step_that_takes_long_to_record_has_one_plan_in_reserve_at_most(transformer, monkeypatch):
    usual = memfit.plan(transformer, budget="1GiB", forbid=["tiling"])
    monkeypatch.setattr(recording, "_MANY_OPERATIONS", 10)
    plan = memfit.plan(transformer, budget="1GiB", forbid=["tiling"])
    assert len(plan.ladder) <= 1
    assert len(plan.ladder) <= len(usual.ladder)
    most_seconds = 1.05 * usual.prediction.step_seconds
    assert plan.prediction.step_seconds <= most_seconds
    assert len(plan.considered) <= len(usual.considered)


@pytest.mark.slow
def test_there_is_no_safer_plan_where_nothing_smaller_can_be_made():
    single = mean_square_job(lambda: torch.nn.Linear(256, 256, bias=False), 256, batch_size=1)
    forbidden = ["optimizer-in-backward", "optimizer-implementation"]
    assert memfit.plan(single, forbid=forbidden).ladder == ()


# --- Approximations ---


@pytest.mark.slow
def test_each_approximation_that_applies_is_recorded_with_the_chosen_plan(transformer, planned):
    found = {each.allow: each for each in planned.approximations}
    assert set(found) >= {"pure-bf16", "bf16", "fp16"}
    seconds = [each.step_seconds for each in planned.approximations]
    assert seconds == sorted(seconds)
    for name in ("pure-bf16", "bf16"):
        plan = Plan(strategies=(*planned.strategies, build_strategy(name, {})))
        again = memfit.predict(transformer, plan=plan)
        assert found[name].peak_bytes == again.peak_allocated_bytes
        assert found[name].step_seconds == again.step_seconds
        assert set(found[name].strategies) == set(plan.labels())


@pytest.mark.slow
def test_what_excludes_an_approximation_makes_room_for_it_unless_it_was_required(transformer):
    plan = memfit.plan(transformer, require=["bf16", "optimizer-in-backward"])
    assert {each.allow for each in plan.approximations} <= {"eight-bit-optimizer"}
    plan = memfit.plan(transformer, allow=["bf16"], require=["optimizer-implementation"])
    names = {each.allow for each in plan.approximations}
    assert names == {"pure-bf16", "fp16"}
    assert not any("bf16" in each.strategies for each in plan.approximations)


@pytest.mark.slow
def test_what_is_allowed_or_forbidden_is_not_tried_again(transformer):
    plan = memfit.plan(transformer, allow=["approximate"])
    assert plan.approximations == ()
    plan = memfit.plan(transformer, forbid=["bf16", "fp16", "eight-bit-optimizer"])
    assert [each.allow for each in plan.approximations] == ["pure-bf16"]


@pytest.mark.slow
def test_where_recording_takes_long_approximations_are_left_out_and_a_note_says_so(
    transformer, monkeypatch
):
    monkeypatch.setattr(assembly, "_MOST_OPERATORS", 0)
    plan = memfit.plan(transformer)
    assert plan.approximations == ()
    assert "What approximations would buy was not recorded" in plan.notes[0]
    assert "--allow NAME" in plan.notes[0]
    notes = memfit.plan(transformer, allow=["approximate"]).notes
    assert not any("approximations" in note for note in notes)


@pytest.mark.slow
def test_an_approximation_that_cannot_be_recorded_is_named_with_the_reason(
    transformer, monkeypatch
):
    def fail(*_args):
        raise StrategyError("bf16", "it is broken.")

    monkeypatch.setattr("memfit.strategies.bf16.Bf16.apply", fail)
    plan = memfit.plan(transformer)
    assert "bf16" not in {each.allow for each in plan.approximations}
    assert "--allow bf16 was tried: it is broken." in plan.notes


# --- Remedies ---


def strongest_removal(job: Job, name: str, facts) -> int:
    """Record the job with every setting of a strategy alone; return the most that one takes off."""
    kind = next(strategy for strategy in CATALOGUE if strategy.name == name)
    settings = [s for s in kind.options(facts) if s.obstacle(facts) is None]
    plain = memfit.predict(job).peak_allocated_bytes
    peaks = [
        memfit.predict(job, plan=Plan(strategies=(setting,))).peak_allocated_bytes
        for setting in settings
        if getattr(setting, "to", "") != "disk"
    ]
    return plain - min(peaks, default=plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        planner_jobs.transformer(width=64, num_blocks=1, tokens=32, batch_size=4),
        pytest.param(
            planner_jobs.resnet(num_blocks=1, batch_size=4),
            marks=pytest.mark.skipif(
                torch.backends.cpu.get_cpu_capability() != "AVX512",
                reason="what convolutions take inside is known for AVX-512 alone",
            ),
        ),
    ],
    ids=["transformer", "resnet"],
)
def test_no_strategy_takes_more_off_the_peak_than_its_remedy_says(job):
    plan = memfit.plan(job)
    facts = record(job).facts
    for remedy in plan.remedies:
        removed = strongest_removal(job, remedy.strategy, facts)
        assert removed <= remedy.most_bytes, remedy.strategy
        if remedy.is_recorded:
            assert max(0, removed) == remedy.most_bytes, remedy.strategy
    by_name = {remedy.strategy: remedy for remedy in plan.remedies}
    assert by_name["optimizer-implementation"].is_recorded
    halved = strongest_removal(job, "pure-bf16", facts)
    assert halved >= 0.85 * by_name["pure-bf16"].most_bytes


@pytest.mark.slow
def test_remedies_are_of_the_plain_step_though_every_plan_must_differ_from_it(transformer, planned):
    required = memfit.plan(transformer, require=["activation-checkpointing"])
    whole = {remedy.strategy: remedy.most_bytes for remedy in planned.remedies}
    found = {r.strategy: r.most_bytes for r in required.remedies if not r.is_recorded}
    assert found["pure-bf16"] == whole["pure-bf16"]
    assert found["micro-batching"] == whole["micro-batching"]
