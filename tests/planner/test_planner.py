"""The planner finds the fastest plan that fits, says why, and says how far off it is if none does."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.zoo.planned_jobs import reasons
from torch import nn

import memfit
from memfit import Job
from memfit.errors import NoPlanFitsError, StrategyError, UnknownDeviceError, UsageError
from memfit.figures import Certainty, Prediction
from memfit.planner.result.explanation import considered_plans
from memfit.planner.search.candidates import Evaluated, Evaluator
from memfit.planner.search.options import Choices, gather_choices
from memfit.planner.search.search import Search
from memfit.prediction.recording import record
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.batchnorm_replay import BatchNormReplay
from memfit.strategies.bf16 import Bf16
from memfit.strategies.loss_chunking import LossChunking
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.optimizer_implementation import OptimizerImplementation
from memfit.strategies.plan import conflict, in_catalogue_order

FUSED, LOOP = (OptimizerImplementation(implementation=name) for name in ("fused", "loop"))
CHUNKED = LossChunking(num_candidates=128)
EVERY, SECOND = ActivationCheckpointing(), ActivationCheckpointing(blocks=("0",))
SPLITS = tuple(MicroBatching(micro_batch_size=size) for size in (32, 16, 8, 4, 2, 1))
FIXED = ((None, FUSED, LOOP), (None, CHUNKED), (None, SECOND, EVERY))
BATCH_SIZE = 64


class World:
    """A made-up job: every strategy multiplies the time and takes bytes off its own part."""

    def __init__(self, factors=None, savings=None, per_sample_bytes: int = 100) -> None:
        self.factors = {FUSED: 0.9, LOOP: 1.1, CHUNKED: 1.2, SECOND: 1.3, EVERY: 1.5}
        self.savings = {FUSED: 500, LOOP: 500, CHUNKED: 2000, SECOND: 3000, EVERY: 5000}
        self.factors |= factors or {}
        self.savings |= savings or {}
        self.per_sample_bytes = per_sample_bytes
        self.num_evaluated = 0

    def peak_bytes(self, strategies) -> int:
        size = next((s.micro_batch_size for s in strategies if s in SPLITS), BATCH_SIZE)
        saved = sum(self.savings.get(strategy, 0) for strategy in strategies)
        return 20_000 - saved + self.per_sample_bytes * size

    def seconds(self, strategies) -> float:
        size = next((s.micro_batch_size for s in strategies if s in SPLITS), BATCH_SIZE)
        factors = (self.factors.get(strategy, 1.0) for strategy in strategies)
        return math.prod(factors) * (1.0 + 0.2 * math.log2(BATCH_SIZE / size))

    def evaluator(self, budget_bytes: int):
        def evaluate(strategies) -> Evaluated:
            self.num_evaluated += 1
            peak = self.peak_bytes(strategies)
            return Evaluated(
                prediction=prediction_of(peak, self.seconds(strategies), budget_bytes, strategies)
            )

        return Evaluator(evaluate)

    def fastest_seconds(self, budget_bytes: int) -> float | None:
        """Try everything."""
        combinations = itertools.product(*FIXED, (None, *SPLITS))
        chosen = ([s for s in members if s is not None] for members in combinations)
        fitting = [self.seconds(c) for c in chosen if self.peak_bytes(c) <= budget_bytes]
        return min(fitting, default=None)


def prediction_of(peak: int, seconds: float, budget_bytes: int, strategies=()) -> Prediction:
    return Prediction(
        device="cpu",
        batch_size=BATCH_SIZE,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=peak,
        process_bytes=peak,
        first_step_peak_bytes=peak,
        step_seconds=seconds,
        by_category={"temporaries": peak},
        by_module={"": peak},
        strategies=[strategy.label() for strategy in strategies],
        numerics="exact",
        certainty=Certainty.EXACT,
        budget_bytes=budget_bytes,
        fits=peak <= budget_bytes,
    )


def choices_of(fixed=FIXED, splits=SPLITS, *, must_split=False) -> Choices:
    return Choices(fixed_size=fixed, splits=splits, must_split=must_split, refused=())


def search(world: World, budget_bytes: int, choices: Choices | None = None):
    return Search(world.evaluator(budget_bytes), choices or choices_of()).run()


# --- Search over made-up figures ---


def test_what_fits_as_it_is_is_left_as_it_is_unless_something_is_faster():
    world = World(factors={FUSED: 1.05})
    assert search(world, 10**6).strategies == ()
    assert search(World(), 10**6).strategies == (FUSED,)


def test_the_fastest_of_what_fits_is_chosen():
    # 26 400 bytes as it is; fused and chunked leave 23 900, fused and every second block 22 900.
    choices = choices_of(splits=())
    assert search(World(), 24_000, choices).strategies == (FUSED, CHUNKED)
    assert search(World(), 23_000, choices).strategies == (FUSED, SECOND)


def test_micro_batches_are_as_large_as_fits():
    chosen = search(World(), 24_000, choices_of(fixed=((None, FUSED),)))
    assert chosen.strategies == (FUSED, SPLITS[0])
    chosen = search(World(), 20_000, choices_of(fixed=((None, FUSED),)))
    assert chosen.strategies == (FUSED, SPLITS[3])


def test_nothing_is_chosen_if_nothing_fits_and_the_smallest_is_known():
    tried = Search(World().evaluator(1000), choices_of())
    assert tried.run() is None
    smallest = tried.smallest()
    peaks = [candidate.prediction.peak_allocated_bytes for candidate in tried.tried.values()]
    assert smallest.prediction.peak_allocated_bytes == min(peaks)
    assert EVERY in smallest.strategies


def test_a_plan_that_must_split_is_split_though_the_whole_batch_fits():
    chosen = search(World(), 10**6, choices_of(must_split=True))
    assert chosen.strategies == (FUSED, SPLITS[0])


def test_what_is_required_is_in_the_plan_though_it_is_slower():
    choices = choices_of(fixed=((None, FUSED), (CHUNKED,)))
    assert search(World(), 10**6, choices).strategies == (FUSED, CHUNKED)


def test_every_combination_is_recorded_once():
    world = World()
    tried = Search(world.evaluator(17_000), choices_of())
    tried.run()
    assert world.num_evaluated == len(tried.tried)
    assert all(key == in_catalogue_order(key) for key in tried.tried)


def test_ties_are_settled_by_bytes_and_then_by_name():
    world = World(factors={FUSED: 1.0, LOOP: 1.0})
    choices = choices_of(fixed=((None, LOOP, FUSED),))
    assert search(world, 10**6, choices).strategies == (FUSED,)
    without_savings = World(factors={FUSED: 1.0, LOOP: 1.0}, savings={FUSED: 0, LOOP: 0})
    assert search(without_savings, 10**6, choices).strategies == ()


def test_strategies_that_conflict_are_never_combined():
    replay = BatchNormReplay(micro_batch_size=8)
    assert conflict([replay, EVERY]).startswith(
        "activation-checkpointing cannot be combined with batchnorm-replay: "
    )
    assert conflict([FUSED, EVERY]) is None
    tried = Search(World().evaluator(1000), choices_of(splits=(replay,)))
    tried.run()
    assert not any(replay in key and (EVERY in key or SECOND in key) for key in tried.tried)
    assert any(replay in key for key in tried.tried)


def test_the_smallest_is_sought_down_to_one_sample():
    tried = Search(World().evaluator(15_000), choices_of(fixed=()))
    assert tried.run() is None
    assert tried.smallest().strategies == (SPLITS[-1],)


FACTORS = st.floats(1.0, 3.0)
SAVINGS = st.integers(1, 5000)
WORLDS = st.builds(
    lambda factors, savings, fused: World(
        factors=dict(zip((LOOP, CHUNKED, SECOND, EVERY), sorted(factors), strict=True))
        | {FUSED: fused},
        savings=dict(zip((FUSED, LOOP, CHUNKED, SECOND, EVERY), sorted(savings), strict=True)),
    ),
    st.lists(FACTORS, min_size=4, max_size=4),
    st.lists(SAVINGS, min_size=5, max_size=5),
    st.floats(0.5, 1.5),
)


@given(WORLDS, st.integers(5000, 27_000))
def test_no_plan_that_fits_is_faster_than_the_chosen_one(world, budget_bytes):
    chosen = search(world, budget_bytes)
    fastest = world.fastest_seconds(budget_bytes)
    if chosen is None:
        assert fastest is None
    else:
        assert chosen.prediction.peak_allocated_bytes <= budget_bytes
        assert chosen.prediction.step_seconds == pytest.approx(fastest)


@given(WORLDS, st.integers(5000, 27_000), st.integers(0, 10_000))
def test_a_smaller_budget_is_never_faster(world, budget_bytes, more_bytes):
    tight, wide = search(world, budget_bytes), search(world, budget_bytes + more_bytes)
    if tight is not None:
        assert wide.prediction.step_seconds <= tight.prediction.step_seconds * (1 + 1e-12)


@given(WORLDS, st.integers(5000, 27_000))
def test_the_same_question_has_the_same_answer(world, budget_bytes):
    first, second = search(world, budget_bytes), search(world, budget_bytes)
    assert (first and first.strategies) == (second and second.strategies)


def test_a_setting_that_saves_only_together_with_another_is_found():
    """Alone, the optimizer's lists stand above the activations, however few are kept."""

    class Peaks(World):
        def peak_bytes(self, strategies) -> int:
            optimizer = 20_000 if FUSED not in strategies else 5_000
            activations = 18_000
            activations -= 12_000 * (EVERY in strategies) + 6_000 * (SECOND in strategies)
            return max(optimizer, activations)

    chosen = search(Peaks(), 7_000, choices_of(splits=()))
    assert chosen is not None
    assert set(chosen.strategies) == {FUSED, EVERY}


def test_every_plan_that_was_tried_is_explained():
    tried = Search(World().evaluator(23_000), choices_of())
    best = tried.run()
    considered = considered_plans(tried.tried.values(), best)
    assert len(considered) == len(tried.tried)
    assert [entry.chosen for entry in considered] == [True] + [False] * (len(considered) - 1)
    assert considered[0].reason == "the fastest that fits"
    for entry in considered[1:]:
        expected = "slower by" if entry.fits else "over the budget"
        assert expected in entry.reason
        assert entry.fits == (entry.peak_bytes <= 23_000)


# --- Jobs ---


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


@pytest.fixture(scope="module")
def job() -> Job:
    return Job(
        model=lambda: nn.Sequential(*(Block(16) for _ in range(4))),
        batch=lambda size: torch.randn(size, 20, 16),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        batch_size=6,
    )


@pytest.fixture(scope="module")
def plain_bytes(job) -> int:
    return memfit.predict(job).peak_allocated_bytes


def test_the_plan_of_a_job_keeps_to_the_budget_and_runs_within_it(job, plain_bytes):
    budget_bytes = int(0.7 * plain_bytes)
    plan = memfit.plan(job, budget=budget_bytes)
    assert plan.strategies
    assert plan.prediction.fits
    assert plan.prediction.budget_bytes == budget_bytes
    assert plan.prediction.peak_allocated_bytes <= budget_bytes
    assert memfit.measure(job, plan).peak_allocated_bytes <= budget_bytes
    assert memfit.verify(job, plan).largest_error < 1e-9


def test_smaller_budgets_give_plans_that_are_no_faster(job, plain_bytes):
    plans = [memfit.plan(job, budget=int(fraction * plain_bytes)) for fraction in (1.0, 0.8, 0.6)]
    seconds = [plan.prediction.step_seconds for plan in plans]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]


@pytest.fixture(scope="module")
def impossible(job) -> NoPlanFitsError:
    """Return the error of a budget that is below the parameters alone."""
    with pytest.raises(NoPlanFitsError) as caught:
        memfit.plan(job, budget="10KiB")
    return caught.value


def test_an_impossible_budget_names_the_smallest_peak_and_what_holds_it(impossible):
    assert impossible.exit_code == 3
    assert impossible.budget_bytes == 10 * 1024
    assert impossible.smallest_peak_bytes > impossible.budget_bytes
    assert sum(impossible.by_category.values()) == impossible.smallest_peak_bytes
    message = str(impossible)
    assert "No plan fits the budget of 10.0 KiB" in message
    assert "parameters" in message
    assert "optimizer state" in message
    assert "--allow bf16" in message
    assert "Raise the budget" in message


def test_the_smallest_peak_named_can_be_reached(job, impossible):
    plan = memfit.plan(job, budget=impossible.smallest_peak_bytes)
    assert plan.prediction.peak_allocated_bytes <= impossible.smallest_peak_bytes


def test_what_changes_results_is_used_only_if_it_is_allowed(job):
    facts = record(job).facts
    names = {each.strategy for each in gather_choices(facts).refused}
    assert "bf16" in names
    for allow in (["bf16"], ["approximate"]):
        options = gather_choices(facts, allow).fixed_size
        assert any(Bf16() in members for members in options)
        assert any(None in members for members in options), "allowed is not required"


def test_a_required_strategy_is_in_every_plan_without_being_allowed(job):
    plan = memfit.plan(job, require=["bf16", "activation-checkpointing"])
    names = {strategy.name for strategy in plan.strategies}
    assert {"bf16", "activation-checkpointing"} <= names
    assert plan.numerics == "approximate"


def test_required_micro_batches_are_made_though_the_batch_fits(job):
    plan = memfit.plan(job, require=["micro-batching"])
    assert MicroBatching(micro_batch_size=3) in plan.strategies


def test_what_is_forbidden_is_in_no_plan(job, plain_bytes):
    budget_bytes = int(0.8 * plain_bytes)
    chosen = {strategy.name for strategy in memfit.plan(job, budget=budget_bytes).strategies}
    forbidden = sorted(chosen - {"optimizer-implementation"})
    plan = memfit.plan(job, budget=budget_bytes, forbid=forbidden)
    assert forbidden
    assert not {strategy.name for strategy in plan.strategies} & set(forbidden)
    assert {name: reasons(plan)[name] for name in forbidden} == dict.fromkeys(
        forbidden, "it was forbidden."
    )


def test_a_required_strategy_that_cannot_apply_is_refused_with_the_reason(job):
    with pytest.raises(StrategyError, match="no batch normalisation"):
        memfit.plan(job, require=["batchnorm-replay"])
    with pytest.raises(StrategyError, match="loss-chunking"):
        memfit.plan(job, require=["loss-chunking"])


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({"allow": ["bf17"]}, "Nearest: bf16"),
        ({"require": ["micro-batch"]}, "Nearest: micro-batching"),
        ({"require": ["approximate"]}, "there is no such strategy"),
        ({"forbid": ["bf17"]}, "Nearest: bf16"),
        ({"require": ["bf16"], "forbid": ["bf16"]}, "both required and forbidden"),
        ({"budget": "plenty"}, "'plenty' is not a size"),
        ({"budget": 0}, "more than 0 bytes"),
        ({"budget": -5}, "The budget must be more than 0 bytes, not -5"),
        ({"host_memory": 0}, "The host memory must be more than 0 bytes, not 0"),
        ({"host_memory": "lots"}, "The host memory 'lots' is not a size"),
        ({"disk": "0GiB"}, "The disk space must be more than 0 bytes, not 0GiB"),
        ({"disk": "lots"}, "The disk space 'lots' is not a size"),
        ({"budget_of": "stack"}, "one of allocated, reserved, process"),
    ],
)
def test_words_that_make_no_sense_are_refused(job, arguments, fragment):
    with pytest.raises(UsageError, match=fragment) as caught:
        memfit.plan(job, **arguments)
    assert caught.value.exit_code == 2


def test_an_unknown_device_is_refused_with_near_names(job):
    with pytest.raises(UnknownDeviceError, match="a100"):
        memfit.plan(job, device="a100")


def test_the_budget_of_a_gpu_is_its_memory_and_bounds_the_process(job):
    plan = memfit.plan(job, device="t4")
    assert plan.prediction.budget_of == "process"
    assert plan.prediction.budget_bytes > 14 * 10**9
    assert plan.prediction.process_bytes > plan.prediction.peak_reserved_bytes
    assert plan.prediction.certainty == "table"


def test_a_budget_may_bound_another_figure(job, plain_bytes):
    with pytest.raises(NoPlanFitsError):
        memfit.plan(job, budget=plain_bytes, budget_of="process")


def test_refused_strategies_are_listed_with_their_reasons(job):
    refused = reasons(memfit.plan(job))
    assert set(refused) >= {"loss-chunking", "batchnorm-replay", "bf16", "allocator-settings"}
    assert all(reason.strip() for reason in refused.values())


def test_progress_is_told_of_every_recording(job, plain_bytes):
    told: list[str] = []
    plan = memfit.plan(job, budget=int(0.8 * plain_bytes), progress=told.append)
    assert len(told) == len(plan.considered) + len(plan.approximations)
    assert told[0] == "as it is"
    assert plan.considered[0].chosen


def test_planning_twice_gives_the_same_plan(job, plain_bytes):
    plans = [memfit.plan(job, budget=int(0.75 * plain_bytes)) for _ in range(2)]
    assert plans[0].strategies == plans[1].strategies
    assert [entry.strategies for entry in plans[0].considered] == [
        entry.strategies for entry in plans[1].considered
    ]


@pytest.mark.parametrize("fraction", [0.5, 0.8, 0.95, 1.0])
def test_whatever_the_budget_the_plan_that_is_given_fits(fraction):
    small = Job(
        model=lambda: nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)),
        batch=lambda size: torch.randn(size, 8),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=64,
    )
    budget_bytes = int(fraction * memfit.predict(small).peak_allocated_bytes)
    plan = memfit.plan(small, budget=budget_bytes)
    assert plan.prediction.peak_allocated_bytes <= budget_bytes
    again = memfit.predict(small, plan=plan)
    assert again.peak_allocated_bytes == plan.prediction.peak_allocated_bytes
