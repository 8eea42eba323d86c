"""What cannot be recorded is left out of the plan and named with the reason; nothing escapes."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from tests.zoo import planned_jobs as planner_jobs
from tests.zoo.planned_jobs import reasons
from tests.zoo.small_jobs import mean_square_job
from torch import nn

import memfit
from memfit import Job
from memfit.analysis.separability import refuted
from memfit.errors import NoPlanFitsError, RecordingError, StrategyError
from memfit.planner.search import evaluation
from memfit.planner.search.evaluation import JobEvaluator
from memfit.planner.search.splits import SplitChecks
from memfit.reports.text import plan_report
from memfit.separation.separation import Separation
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.allocator_settings import AllocatorConf
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.optimizer_implementation import OptimizerImplementation
from memfit.strategies.tiling import Tiling

FUSED = OptimizerImplementation(implementation="fused")
HALVED, TILED = MicroBatching(micro_batch_size=2), Tiling(num_tiles=4)
RECOMPUTED = ActivationCheckpointing()


class Stubborn(nn.Sequential):
    """Layers that know how many samples there are."""

    def forward(self, x):
        return super().forward(x).view(8, 32, 64)


def stubborn() -> Job:
    """Return a job that can be recorded as it is, and in no micro-batches."""
    return mean_square_job(
        lambda: Stubborn(*(planner_jobs.MLP(64) for _ in range(3))),
        32,
        64,
        batch_size=8,
        optimizer=planner_jobs.sgd,
    )


@pytest.fixture(scope="module")
def transformer() -> Job:
    return planner_jobs.transformer(width=32, num_blocks=2, tokens=32, batch_size=4)


@pytest.fixture(scope="module")
def plain_bytes(transformer) -> int:
    return memfit.predict(transformer).peak_allocated_bytes


def text_of(plan) -> str:
    file = io.StringIO()
    Console(file=file, width=80, color_system=None).print(plan_report(plan))
    return " ".join(file.getvalue().split())


# --- Whole plans ---


@pytest.mark.slow
def test_a_model_that_fails_in_micro_batches_is_planned_without_them():
    job = stubborn()
    budget = int(0.8 * memfit.predict(job).peak_allocated_bytes)
    plan = memfit.plan(job, budget=budget)
    assert plan.prediction.fits
    assert not any("micro-batching" in label for row in plan.considered for label in row.strategies)
    with pytest.raises(StrategyError, match="is invalid for input of size") as refused:
        memfit.plan(job, budget=budget, require=["micro-batching"])
    assert refused.value.reason.startswith("the step fails on ")


@pytest.mark.slow
def test_where_no_plan_fits_the_error_names_what_could_not_be_recorded():
    with pytest.raises(NoPlanFitsError, match=r"Left out: micro-batching\(4\): .* is invalid for"):
        memfit.plan(stubborn(), budget="10KiB", forbid=["cached-gradients", "tiling"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("a kernel is missing\nand much more\nof it"),
        NotImplementedError("a kernel is missing"),
        TypeError("a kernel is missing."),
        AssertionError("\n  a kernel is missing"),
        RecordingError("a kernel is missing", "Do without."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_strategy_raises_while_recorded_leaves_it_out(
    transformer, plain_bytes, monkeypatch, error
):
    def fail(*_args):
        raise error

    monkeypatch.setattr(ActivationCheckpointing, "apply", fail)
    monkeypatch.setattr(Tiling, "apply", fail)
    plan = memfit.plan(transformer, budget=int(0.8 * plain_bytes))
    reason = reasons(plan)["activation-checkpointing"]
    assert type(error).__name__ in reason
    assert "a kernel is missing" in reason
    assert "much more" not in reason
    assert not reason.endswith("..")
    assert not {"activation-checkpointing", "tiling"} & {s.name for s in plan.strategies}


@pytest.mark.slow
def test_what_fails_in_some_settings_only_is_named_beside_a_plan_that_uses_it(
    transformer, plain_bytes, monkeypatch
):
    apply = ActivationCheckpointing.apply
    first: list[ActivationCheckpointing] = []

    def fail_once(self, session):
        first.append(self)
        if len(first) == 1:
            raise RuntimeError("these blocks are special")
        return apply(self, session)

    monkeypatch.setattr(ActivationCheckpointing, "apply", fail_once)
    forbid = ["micro-batching", "tiling", "optimizer-in-backward"]
    plan = memfit.plan(transformer, budget=int(0.9 * plain_bytes), forbid=forbid)
    assert "activation-checkpointing" in {strategy.name for strategy in plan.strategies}
    assert "activation-checkpointing" not in reasons(plan)
    (note,) = (n for n in plan.notes if n.startswith("activation-checkpointing, in some plans: "))
    assert "these blocks are special" in note
    assert note in text_of(plan)


@pytest.mark.slow
def test_a_required_strategy_that_cannot_be_recorded_is_an_error_with_its_cause(
    transformer, monkeypatch
):
    def fail(*_args):
        raise RuntimeError("a kernel is missing")

    monkeypatch.setattr(Tiling, "apply", fail)
    with pytest.raises(
        StrategyError, match=r"'tiling' cannot be used.*a kernel is missing"
    ) as found:
        memfit.plan(transformer, require=["tiling"])
    assert isinstance(found.value.__cause__, RuntimeError)


def test_a_job_that_cannot_be_recorded_as_it_is_still_raises(monkeypatch):
    def fail(*_args):
        raise NotImplementedError("no such operator")

    monkeypatch.setattr(planner_jobs.MLP, "forward", fail)
    with pytest.raises(Exception, match="no such operator") as found:
        memfit.plan(stubborn())
    assert not isinstance(found.value, StrategyError)


# --- What is blamed ---


class Recordings:
    """Stands in for recording: fails where a set of names is in a plan."""

    def __init__(self, recording, *broken: set[str]) -> None:
        self.recording, self.broken = recording, broken

    def __call__(self, _job, plan, _layout, **_wanted):
        names = {strategy.name for strategy in plan.strategies}
        if any(broken <= names for broken in self.broken):
            raise RuntimeError("no")
        return self.recording


@pytest.fixture
def evaluator(transformer) -> JobEvaluator:
    return planner_jobs.evaluator_of(transformer, may_recompute=False)


def blamed(evaluator: JobEvaluator, *strategies) -> str:
    with pytest.raises(StrategyError) as found:
        evaluator.in_short(strategies)
    assert str(found.value.__cause__) == "no"
    return found.value.strategy


@pytest.mark.slow
def test_what_was_never_recorded_is_blamed_and_a_combination_where_all_of_it_was(
    evaluator, monkeypatch
):
    broken = ({"activation-checkpointing"}, {"tiling", "micro-batching"})
    monkeypatch.setattr(evaluation, "record", Recordings(evaluator.plain, *broken))
    assert blamed(evaluator, RECOMPUTED) == "activation-checkpointing"
    evaluator.in_short((FUSED,))
    assert blamed(evaluator, FUSED, RECOMPUTED, RECOMPUTED) == "activation-checkpointing"
    evaluator.in_short((FUSED, TILED))
    assert blamed(evaluator, FUSED, TILED, HALVED) == "micro-batching"
    evaluator.in_full((HALVED,))
    together = "optimizer-implementation + tiling + micro-batching"
    assert blamed(evaluator, FUSED, TILED, HALVED) == together


@pytest.mark.slow
def test_what_runs_out_of_memory_is_no_fault_of_a_strategy(evaluator, monkeypatch):
    def fail(*_args, **_wanted):
        raise MemoryError

    monkeypatch.setattr(evaluation, "record", fail)
    with pytest.raises(MemoryError):
        evaluator.in_full((FUSED,))
    conf = AllocatorConf(conf="max_split_size_mb:64")
    assert evaluator.in_full((conf,)).prediction.fits, "nothing had to be recorded"


@pytest.mark.slow
def test_no_batch_is_cut_before_it_is_known_that_the_loss_allows_it(evaluator, transformer):
    asked: list[int] = []

    class Coupled(Separation):
        def of(self, micro_batch_size, *, given_statistics=False):
            asked.append(micro_batch_size)
            return refuted("the loss couples samples.")

    facts = replace(evaluator.plain.facts, separation=Coupled(evaluator.job, evaluator.layout))
    checks = SplitChecks([HALVED], facts)
    careful = planner_jobs.evaluator_of(transformer, may_recompute=False, split_checks=checks)
    careful.in_short((FUSED,))
    assert not asked
    with pytest.raises(StrategyError, match="couples samples"):
        careful.in_short((FUSED, HALVED))
    with pytest.raises(StrategyError, match="couples samples"):
        careful.in_full((HALVED,))
    assert asked == [HALVED.micro_batch_size]
