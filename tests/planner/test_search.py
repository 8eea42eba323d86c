"""The search over made-up jobs whose blocks can be recomputed, with estimates that are off."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memfit.errors import StrategyError
from memfit.figures import Certainty, Prediction
from memfit.planner.result.assembly import considered_plans
from memfit.planner.result.ladder import Ladder
from memfit.planner.search.candidates import Candidate, Evaluator, Refinement
from memfit.planner.search.options import SearchSpace
from memfit.planner.search.search import Search
from memfit.planner.search.splits import SplitChecks
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.batchnorm_replay import BatchNormReplay
from memfit.strategies.fused_attention import FusedAttention
from memfit.strategies.loss_chunking import LossChunking
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.optimizer_implementation import OptimizerImplementation
from memfit.strategies.plan import conflict, in_catalogue_order
from memfit.trace.events import Category

FUSED, LOOP = (OptimizerImplementation(implementation=name) for name in ("fused", "loop"))
ATTENTION = FusedAttention()
CHUNKED = LossChunking(num_candidates=128)
BATCH_SIZE, NUM_BLOCKS = 64, 8
SPLITS = tuple(MicroBatching(micro_batch_size=size) for size in (32, 16, 8, 4, 2, 1))
BLOCKS = tuple(
    ActivationCheckpointing(blocks=(f"layers.0-{number}",)) for number in range(NUM_BLOCKS)
)
FIXED = ((None, FUSED), (None, CHUNKED))
LARGEST_ERROR = 0.01


class World:
    """A made-up job.

    Recomputing blocks takes bytes off each sample and adds to the time; what is recorded differs
    from what was estimated by up to ``LARGEST_ERROR``, another way for every combination.
    """

    def __init__(self, seed: int = 0, *, is_short: bool = False, errors: bool = True) -> None:
        draw = random.Random(seed)
        self.seed, self.is_short, self.errors = seed, is_short, errors
        self.factors = {FUSED: draw.uniform(0.7, 1.2), CHUNKED: draw.uniform(1.0, 1.5)}
        self.savings = {FUSED: draw.randint(500, 3000), CHUNKED: draw.randint(500, 3000)}
        self.fixed_bytes, self.sample_bytes = 10_000, draw.randint(100, 800)
        self.recompute = draw.uniform(0.005, 0.08)
        self.by_category: dict[str, int] = {}
        self.broken: set = set()
        self.short: list = []
        self.full: list = []

    def num_recomputed(self, strategies) -> int:
        return next((BLOCKS.index(s) + 1 for s in strategies if s in BLOCKS), 0)

    def estimated_bytes(self, strategies) -> int:
        size = next((s.micro_batch_size for s in strategies if s in SPLITS), BATCH_SIZE)
        kept_fraction = 1 - 0.8 * self.num_recomputed(strategies) / NUM_BLOCKS
        saved = sum(self.savings.get(strategy, 0) for strategy in strategies)
        return self.fixed_bytes - saved + int(self.sample_bytes * size * kept_fraction)

    def peak_bytes(self, strategies) -> int:
        peak_bytes = self.estimated_bytes(strategies)
        if not self.errors or not self.num_recomputed(strategies):
            return peak_bytes
        labels = "".join(strategy.label() for strategy in strategies)
        error = random.Random(f"{self.seed}{labels}").uniform(-LARGEST_ERROR, LARGEST_ERROR)
        return int(peak_bytes * (1 + error))

    def seconds(self, strategies) -> float:
        size = next((s.micro_batch_size for s in strategies if s in SPLITS), BATCH_SIZE)
        factors = (self.factors.get(strategy, 1.0) for strategy in strategies)
        again = 1 + self.recompute * self.num_recomputed(strategies)
        return math.prod(factors) * again * (1.0 + 0.1 * math.log2(BATCH_SIZE / size))

    def evaluator(self, budget_bytes: int) -> Evaluator:
        def evaluated(strategies, *, is_exact: bool) -> Candidate:
            if broken := self.broken.intersection(strategies):
                raise StrategyError(broken.pop().name, "it is broken.")
            refinements = ()
            if not self.num_recomputed(strategies):
                finer = (in_catalogue_order((*strategies, blocks)) for blocks in BLOCKS)
                refinements = tuple(
                    Refinement(
                        strategies=members,
                        peak_bytes=self.estimated_bytes(members),
                        seconds=self.seconds(members),
                    )
                    for members in finer
                )
            prediction = self.prediction(strategies, budget_bytes, is_exact=is_exact)
            return Candidate(
                strategies=strategies,
                prediction=prediction,
                is_exact=is_exact,
                refinements=refinements,
            )

        def in_short(strategies) -> Candidate:
            self.short.append(strategies)
            return evaluated(strategies, is_exact=not (self.is_short and self.is_split(strategies)))

        def in_full(strategies) -> Candidate:
            self.full.append(strategies)
            return evaluated(strategies, is_exact=True)

        return Evaluator(in_short, in_full)

    def is_split(self, strategies) -> bool:
        return any(strategy in SPLITS for strategy in strategies)

    def prediction(self, strategies, budget_bytes: int, *, is_exact: bool = True) -> Prediction:
        del is_exact
        peak_bytes = self.peak_bytes(strategies)
        return Prediction(
            device="cpu",
            batch_size=BATCH_SIZE,
            peak_allocated_bytes=peak_bytes,
            peak_reserved_bytes=peak_bytes,
            process_bytes=peak_bytes,
            first_step_peak_bytes=peak_bytes,
            step_seconds=self.seconds(strategies),
            by_category=self.by_category,
            by_module={},
            strategies=[strategy.label() for strategy in strategies],
            numerics="exact",
            certainty=Certainty.EXACT,
            budget_bytes=budget_bytes,
            fits=peak_bytes <= budget_bytes,
        )

    def every_combination(self):
        combinations = itertools.product(*FIXED, (None, *BLOCKS), (None, *SPLITS))
        return (
            in_catalogue_order([s for s in members if s is not None]) for members in combinations
        )

    def fastest_seconds(self, budget_bytes: float) -> float | None:
        """Try everything."""
        found = (self.seconds(c) for c in self.every_combination() if self.fits(c, budget_bytes))
        return min(found, default=None)

    def fits(self, strategies, budget_bytes: float) -> bool:
        return self.peak_bytes(strategies) <= budget_bytes


class Lengthened(World):
    """Recording a few micro-batches says too little of what the whole batch takes."""

    def prediction(self, strategies, budget_bytes: int, *, is_exact: bool = True) -> Prediction:
        found = super().prediction(strategies, budget_bytes)
        if is_exact:
            return found
        peak_bytes = int(found.peak_allocated_bytes * 0.95)
        return replace(
            found,
            peak_allocated_bytes=peak_bytes,
            step_seconds=found.step_seconds * 0.99,
            fits=peak_bytes <= budget_bytes,
        )


def space_of(*, must_split: bool = False, splits=SPLITS, fixed=FIXED) -> SearchSpace:
    return SearchSpace(options=fixed, splits=splits, must_split=must_split, refused=())


def search_of(
    world: World, budget_bytes: int, *, patience=None, on_better=None, **wanted
) -> Search:
    evaluator, space = world.evaluator(budget_bytes), space_of(**wanted)
    return Search(evaluator, space, patience=patience, on_better=on_better)


SEEDS = st.integers(0, 10**6)
BUDGETS = st.integers(5_000, 60_000)


@pytest.mark.slow
@given(SEEDS, BUDGETS)
def test_the_chosen_plan_fits_and_is_the_fastest_within_what_wrong_estimates_allow(seed, budget):
    world = World(seed)
    chosen = search_of(world, budget).run()
    if chosen is None:
        assert world.fastest_seconds(budget * (1 - 2 * LARGEST_ERROR)) is None
        return
    assert chosen.prediction.fits
    assert world.fits(chosen.strategies, budget)
    fastest = world.fastest_seconds(budget * (1 - 2 * LARGEST_ERROR))
    assert fastest is None or chosen.prediction.step_seconds <= fastest * (1 + 1e-9)


@pytest.mark.slow
@given(SEEDS, BUDGETS)
def test_with_right_estimates_the_chosen_plan_is_the_fastest_of_all(seed, budget):
    world = World(seed, errors=False)
    chosen = search_of(world, budget).run()
    found = chosen and pytest.approx(chosen.prediction.step_seconds)
    assert found == world.fastest_seconds(budget)


class SomeRefused(SplitChecks):
    """Take only some sizes, which is known at once."""

    def __init__(self, refused: set[MicroBatching]) -> None:
        self.mixed = refused

    def obstacle(self, split) -> str | None:
        return "it mixes samples." if split in self.mixed else None

    @property
    def allows_some(self) -> bool:
        return self.mixed < set(SPLITS)

    def is_settled(self, split) -> bool:
        return True


@pytest.mark.slow
@given(SEEDS, BUDGETS, st.sets(st.sampled_from(SPLITS)))
def test_of_sizes_that_may_not_be_taken_none_is_recorded_and_the_next_ones_are(
    seed, budget, refused
):
    world = World(seed, errors=False)
    space = replace(space_of(), split_checks=SomeRefused(refused))
    chosen = Search(world.evaluator(budget), space).run()
    assert not any(refused.intersection(strategies) for strategies in world.short)
    allowed = (each for each in world.every_combination() if not refused.intersection(each))
    fitting = [world.seconds(each) for each in allowed if world.fits(each, budget)]
    found = chosen and pytest.approx(chosen.prediction.step_seconds)
    assert found == min(fitting, default=None)


@pytest.mark.slow
@given(SEEDS, BUDGETS, st.integers(0, 20_000))
def test_a_larger_budget_is_never_slower_within_what_wrong_estimates_allow(seed, budget, more):
    world = World(seed)
    tight = search_of(world, budget).run()
    wide = search_of(world, int(budget * (1 + 3 * LARGEST_ERROR)) + more).run()
    if tight is not None:
        assert wide is not None
        assert wide.prediction.step_seconds <= tight.prediction.step_seconds * (1 + 1e-9)


@pytest.mark.slow
@given(SEEDS, BUDGETS)
def test_the_same_question_has_the_same_answer_in_the_same_order(seed, budget):
    worlds = World(seed), World(seed)
    answers = [search_of(world, budget).run() for world in worlds]
    assert answers[0] == answers[1]
    assert worlds[0].short == worlds[1].short


@pytest.mark.slow
@given(SEEDS, BUDGETS)
def test_every_combination_is_recorded_once_in_short_and_at_most_once_in_full(seed, budget):
    world = World(seed, is_short=True)
    search_of(world, budget).run()
    assert len(world.short) == len(set(world.short))
    assert all(strategies == in_catalogue_order(strategies) for strategies in world.short)
    assert len(world.full) == len(set(world.full))


@pytest.mark.slow
@given(SEEDS, BUDGETS)
def test_what_is_chosen_has_been_recorded_in_full(seed, budget):
    world = Lengthened(seed, is_short=True)
    chosen = search_of(world, budget).run()
    if chosen is not None:
        assert not world.is_split(chosen.strategies) or chosen.strategies in world.full
        assert chosen.prediction == world.prediction(chosen.strategies, budget)
        assert world.fits(chosen.strategies, budget)


@pytest.mark.slow
@given(SEEDS, BUDGETS)
def test_a_plan_is_found_though_short_recordings_promised_too_much(seed, budget):
    """Where the whole batch turns out not to fit, what makes it smaller is tried after all."""
    world = Lengthened(seed, is_short=True)
    chosen = search_of(world, budget).run()
    fastest = world.fastest_seconds(budget * (1 - 2 * LARGEST_ERROR))
    if fastest is not None:
        assert chosen is not None
        assert chosen.prediction.step_seconds <= fastest * (1 + 1e-9)


def test_a_refinement_is_recorded_only_if_it_may_fit():
    world = World(seed=3)
    search_of(world, 40_000, splits=()).run()
    for strategies in world.short:
        if world.num_recomputed(strategies):
            assert world.estimated_bytes(strategies) <= 40_000 * 1.04


class Fragmented(World):
    """Everything with recomputed blocks takes less than was estimated, by a tenth."""

    def peak_bytes(self, strategies) -> int:
        share = 0.9 if self.num_recomputed(strategies) else 1.0
        return int(self.estimated_bytes(strategies) * share)


@pytest.mark.slow
@given(SEEDS, st.floats(0.5, 0.95))
@example(99484, 0.625)  # a first plan was recorded before what learns from it
def test_estimates_that_are_all_too_high_are_corrected_by_what_was_recorded(seed, share):
    world = Fragmented(seed)
    budget = int(share * world.estimated_bytes(()))
    chosen = search_of(world, budget, splits=(), fixed=()).run()
    fitting = [world.seconds((c,)) for c in BLOCKS if world.fits((c,), 0.97 * budget)]
    if fitting:
        assert chosen is not None
        assert chosen.prediction.fits
        assert chosen.prediction.step_seconds <= min(fitting) * (1 + 1e-9)


def test_ties_are_settled_by_bytes_and_then_by_what_is_left_as_it_is():
    world = World(errors=False)
    world.factors = dict.fromkeys((FUSED, LOOP), 1.0)
    world.savings = {FUSED: 500, LOOP: 400}
    wanted = {"fixed": ((None, LOOP, FUSED),), "splits": ()}
    assert search_of(world, 10**6, **wanted).run().strategies == (FUSED,)
    world.savings = {}
    assert search_of(world, 10**6, **wanted).run().strategies == ()


def test_what_is_required_is_in_the_plan_though_it_is_slower():
    world = World(errors=False)
    world.factors = {FUSED: 0.9, CHUNKED: 1.2}
    chosen = search_of(world, 10**6, fixed=((None, FUSED), (CHUNKED,))).run()
    assert chosen.strategies == (FUSED, CHUNKED)


def test_strategies_that_conflict_are_never_combined():
    replay, every = BatchNormReplay(micro_batch_size=8), ActivationCheckpointing()
    assert conflict([replay, every]).startswith(
        "activation-checkpointing cannot be combined with batchnorm-replay: "
    )
    assert conflict([FUSED, every]) is None
    world = World(errors=False)
    search_of(world, 1000, splits=(replay,), fixed=((None, every),)).run()
    assert any(replay in key for key in world.short)
    assert not any({replay, every} <= set(key) for key in world.short)


def test_a_setting_that_saves_only_together_with_another_is_found():
    """Alone, the optimizer's lists stand above what the loss takes, however little that is."""

    class Peaks(World):
        def estimated_bytes(self, strategies) -> int:
            return max(
                5_000 if FUSED in strategies else 20_000, 6_000 if CHUNKED in strategies else 18_000
            )

    chosen = search_of(Peaks(errors=False), 7_000, splits=()).run()
    assert set(chosen.strategies) == {FUSED, CHUNKED}


def test_every_plan_that_was_tried_is_explained():
    _, search, best = ready()
    tried = search.recordings.tried
    considered = considered_plans(tried.values(), best)
    assert len(considered) == len(tried)
    assert [entry.chosen for entry in considered] == [True] + [False] * (len(considered) - 1)
    assert considered[0].reason == "the fastest that fits"
    for entry in considered[1:]:
        expected = ("slower by", "about as fast") if entry.fits else ("over the budget",)
        assert any(words in entry.reason for words in expected)
        assert entry.fits == (entry.peak_bytes <= best.prediction.budget_bytes)


# --- Strategies that turn out not to apply ---


def test_a_strategy_that_fails_while_it_is_recorded_is_refused_with_the_reason():
    world = World(errors=False)
    world.broken = {CHUNKED}
    search = search_of(world, 30_000)
    chosen = search.run()
    assert chosen is not None
    assert CHUNKED not in chosen.strategies
    assert search.recordings.refused == {"loss-chunking": "it is broken."}


@pytest.mark.parametrize("broken", [BLOCKS[:3], BLOCKS])
def test_blocks_that_cannot_be_recomputed_are_left_out_and_others_taken(broken):
    world = World(seed=5, errors=False)
    budget = int(0.85 * world.estimated_bytes(()))
    world.broken = set(broken)
    search = search_of(world, budget, splits=())
    chosen = search.run()
    if len(broken) == len(BLOCKS):
        assert not world.num_recomputed(chosen.strategies if chosen else ())
        assert "activation-checkpointing" in search.recordings.refused
    else:
        assert chosen is not None
        assert chosen.prediction.fits
        assert not set(chosen.strategies) & set(broken)


def test_the_smallest_is_named_though_its_blocks_cannot_be_recomputed():
    world = World(seed=5, errors=False)
    world.broken = set(BLOCKS)
    search = search_of(world, 100)
    assert search.run() is None
    smallest = search.smallest()
    assert world.num_recomputed(smallest.strategies) == 0
    assert SPLITS[-1] in smallest.strategies


def test_the_smallest_is_found_though_every_step_towards_it_is_larger():
    class Together(World):
        def estimated_bytes(self, strategies) -> int:
            saved = 5000 if {FUSED, CHUNKED} <= set(strategies) else 0
            return super().estimated_bytes(strategies) - saved

    world = Together(errors=False)
    world.savings = {FUSED: -500, CHUNKED: -500}
    search = search_of(world, 100)
    assert search.run() is None
    assert {FUSED, CHUNKED, SPLITS[-1]} <= set(search.smallest().strategies)


def test_what_lives_all_the_time_over_the_budget_ends_the_search_at_once():
    world = World(errors=False)
    search = search_of(world, 100)
    assert search.run() is None
    smallest = search.smallest()
    lasting_bytes = smallest.prediction.peak_allocated_bytes - 1
    num_recorded = []
    for share in (0.5, 0.51):
        world.short.clear()
        lasting = Category.PARAMETERS.value, Category.OPTIMIZER_STATE.value
        world.by_category = dict.fromkeys(lasting, int(share * lasting_bytes))
        search = search_of(world, lasting_bytes)
        assert search.run() is None
        assert search.smallest().strategies == smallest.strategies
        num_recorded.append(len(world.short))
    assert num_recorded[1] < num_recorded[0]


def test_where_what_is_faster_cannot_be_combined_the_job_as_it_is_remains():
    class Clashing(World):
        def evaluator(self, budget_bytes: int) -> Evaluator:
            inner = super().evaluator(budget_bytes).in_short

            def evaluate(strategies) -> Candidate:
                if {FUSED, ATTENTION} <= set(strategies):
                    raise StrategyError("fused-attention", "it does not go with the other.")
                return inner(strategies)

            return Evaluator(evaluate)

    world = Clashing(errors=False)
    world.factors = {FUSED: 0.8, ATTENTION: 0.9}
    search = search_of(world, 10**6, fixed=((None, ATTENTION), (None, FUSED)))
    assert search.run().prediction.fits
    assert search.recordings.refused == {"fused-attention": "it does not go with the other."}


# --- Micro-batches that are required ---


@pytest.mark.slow
@given(SEEDS, BUDGETS)
def test_where_micro_batches_are_required_every_plan_that_is_given_has_them(seed, budget):
    world = World(seed)
    search = search_of(world, budget, must_split=True)
    chosen = search.run()
    given = [chosen] if chosen else [search.smallest()]
    if chosen:
        given += [Ladder(search).fastest_below(int(0.7 * chosen.prediction.peak_allocated_bytes))]
    assert all(world.is_split(candidate.strategies) for candidate in given if candidate)


def test_required_micro_batches_are_not_left_out_because_they_take_more():
    class Heavier(World):
        def estimated_bytes(self, strategies) -> int:
            return super().estimated_bytes(strategies) + 60_000 * self.is_split(strategies)

    world = Heavier(errors=False)
    search = search_of(world, world.estimated_bytes((FUSED, CHUNKED)), must_split=True, fixed=())
    assert search.run() is None
    assert world.is_split(search.smallest().strategies)


# --- What lies around the chosen plan ---


def ready(seed: int = 1, share: float = 0.8):
    """Return a world, a budget of a share of its peak, and a search that has been run."""
    world = World(seed)
    budget = int(share * world.estimated_bytes(()))
    search = search_of(world, budget)
    return world, search, search.run()


@pytest.mark.parametrize("seed", range(5))
def test_the_fastest_below_a_peak_is_recorded_and_below_it(seed):
    world, search, best = ready(seed)
    most_bytes = int(0.75 * best.prediction.peak_allocated_bytes)
    below = Ladder(search).fastest_below(most_bytes)
    assert below is not None
    assert below.prediction.peak_allocated_bytes == world.peak_bytes(below.strategies) <= most_bytes
    assert below.prediction.step_seconds >= best.prediction.step_seconds * (1 - 1e-9)
    assert below.strategies in search.recordings.tried
    known = [c.prediction for c in search.recordings.tried.values()]
    fitting = [p.step_seconds for p in known if p.peak_allocated_bytes <= most_bytes]
    assert below.prediction.step_seconds == min(fitting)


def test_nothing_is_below_a_peak_that_cannot_be_reached():
    _, search, _ = ready()
    assert Ladder(search).fastest_below(100) is None


def test_blocks_that_cannot_be_recomputed_are_left_out_of_what_is_below():
    world, search, best = ready()
    world.broken = set(BLOCKS)
    below = Ladder(search).fastest_below(best.prediction.peak_allocated_bytes // 2)
    assert below is None or not world.broken.intersection(below.strategies)


def test_what_is_below_a_peak_keeps_to_the_other_budgets_as_well():
    class Elsewhere(World):
        def prediction(self, strategies, budget_bytes: int, *, is_exact: bool = True) -> Prediction:
            found = super().prediction(strategies, budget_bytes, is_exact=is_exact)
            return replace(found, fits=found.fits and BLOCKS[-1] not in strategies)

    world = Elsewhere(seed=1)
    search = search_of(world, world.peak_bytes((CHUNKED,)), splits=())
    best = search.run()
    smallest_bytes = min(r.peak_bytes for _, r in search.tree.refinements())
    below = Ladder(search).fastest_below(int(1.02 * smallest_bytes))
    assert best.prediction.fits
    assert below is None or below.prediction.fits


@pytest.mark.parametrize("seed", range(5))
def test_further_candidates_fit_and_come_in_the_order_of_time(seed):
    world, search, best = ready(seed)
    most_seconds = 1.3 * best.prediction.step_seconds
    more = []
    while len(more) < 4 and (candidate := search.further([best, *more], most_seconds)):
        more.append(candidate)
    seconds = [c.prediction.step_seconds for c in (best, *more)]
    assert 1 <= len(more) <= 4
    assert seconds == sorted(seconds)
    assert seconds[-1] <= most_seconds
    assert all(world.fits(c.strategies, c.prediction.budget_bytes) for c in more)
    assert len({c.strategies for c in (best, *more)}) == len(more) + 1
    others = [tuple(s for s in c.strategies if s not in BLOCKS) for c in (best, *more)]
    assert max(others.count(each) for each in others) <= 2


def test_with_slack_fewer_are_recorded_and_the_plan_is_slower_by_no_more():
    recorded = []
    for slack in (0.0, 0.05):
        world = World(seed=2)
        budget = int(0.6 * world.estimated_bytes(()))
        chosen = Search(world.evaluator(budget), space_of(), slack=slack).run()
        recorded.append((len(world.short), chosen.prediction.step_seconds))
    (most, best_seconds), (fewer, seconds) = recorded
    assert fewer <= most
    assert best_seconds <= seconds <= 1.05 * best_seconds
