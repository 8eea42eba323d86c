"""Plans with figures from this machine: what is run, and which of the measured plans is chosen."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from memfit.cost.operator_times import OperatorTimes
from memfit.devices.catalogue import load_device
from memfit.errors import DeviceUnavailableError
from memfit.figures import Certainty, Prediction
from memfit.planner import measured
from memfit.planner.measured import PlanClock, check_is_here, fastest_measured, measured_times
from memfit.planner.search.candidates import Candidate
from memfit.planner.search.neighbours import Neighbours
from memfit.planner.search.options import SearchSpace
from memfit.prediction.recording import record
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.cached_gradients import CachedGradients
from memfit.strategies.fused_attention import FusedAttention
from memfit.strategies.loss_chunking import LossChunking
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.optimizer_implementation import OptimizerImplementation
from memfit.strategies.optimizer_in_backward import OptimizerInBackward
from memfit.strategies.plan import in_catalogue_order

CPU, T4 = load_device("cpu"), load_device("t4")


def candidate(size: int, seconds: float) -> Candidate:
    return Candidate(
        strategies=(MicroBatching(micro_batch_size=size),),
        prediction=Prediction(
            device="cpu",
            batch_size=8,
            peak_allocated_bytes=size,
            peak_reserved_bytes=size,
            process_bytes=size,
            first_step_peak_bytes=size,
            step_seconds=seconds,
            by_category={},
            by_module={},
            strategies=(),
            numerics="exact",
            certainty=Certainty.EXACT,
        ),
    )


class Waiting:
    """A search in whose queue further candidates wait."""

    def __init__(self, *waiting: Candidate, over_after: float = float("inf")) -> None:
        self.waiting = waiting
        self.over_after = over_after
        self.asked: list[float] = []
        self.smaller: dict[int, Candidate | list[Candidate]] = {}

    @property
    def is_over(self) -> bool:
        return len(self.asked) >= self.over_after

    def further(self, found: list[Candidate], most_seconds: float) -> Candidate | None:
        self.asked.append(most_seconds)
        left = (c for c in self.waiting if c not in found)
        return next((c for c in left if c.prediction.step_seconds <= most_seconds), None)

    def perhaps_faster(self, strategies: tuple[MicroBatching, ...]) -> list[Candidate]:
        found = self.smaller.get(strategies[0].micro_batch_size, [])
        return found if isinstance(found, list) else [found]


@pytest.fixture
def timed(monkeypatch):
    """Let plans take as long as a table says, by their micro-batch."""
    table, run = {}, []

    def time_plans(job, plans, device, known, num_rounds=3, enough_seconds=0.0, all_fit=False):
        sizes = [plan.strategies[0].micro_batch_size for plan in plans]
        run.extend(sizes)
        return [table[size] for size in sizes]

    monkeypatch.setattr(measured, "time_plans", time_plans)
    return SimpleNamespace(table=table, run=run)


def test_of_the_plans_that_are_run_the_fastest_is_chosen_with_its_measured_time(timed):
    timed.table |= {8: 2.0, 4: 1.5, 2: 3.0}
    search = Waiting(candidate(4, 1.1), candidate(2, 1.15))
    chosen = fastest_measured(PlanClock(None, CPU), candidate(8, 1.0), search)
    assert chosen.strategies == (MicroBatching(micro_batch_size=4),)
    assert chosen.prediction.step_seconds == 1.5
    assert chosen.prediction.peak_allocated_bytes == 4


def test_only_plans_that_are_estimated_to_be_about_as_fast_are_run(timed):
    timed.table |= dict.fromkeys(range(1, 20), 1.0)
    waiting = [candidate(size, 1.0 + size / 30) for size in range(2, 20)]
    fastest_measured(PlanClock(None, CPU), candidate(1, 1.0), Waiting(*waiting))
    assert set(timed.run) == {1, 2, 3, 4, 5, 6}


def test_so_many_plans_are_run_and_no_more(timed):
    timed.table |= dict.fromkeys(range(1, 40), 1.0)
    waiting = [candidate(size, 1.0) for size in range(2, 40)]
    fastest_measured(PlanClock(None, CPU), candidate(1, 1.0), Waiting(*waiting))
    assert len(set(timed.run)) == 8


def test_where_the_best_plan_is_slower_than_estimated_slower_estimates_are_run_too(timed):
    timed.table |= {8: 4.0, 4: 2.5, 2: 9.0}
    search = Waiting(candidate(4, 2.0), candidate(2, 2.6))
    chosen = fastest_measured(PlanClock(None, CPU), candidate(8, 1.0), search)
    assert chosen.strategies == (MicroBatching(micro_batch_size=4),)
    assert search.asked == [4.0, 2.5]
    assert 2 not in timed.run


def test_what_was_measured_corrects_the_estimates_of_combinations_with_more_strategies(timed):
    timed.table |= {8: 3.0}
    more = replace(
        candidate(8, 1.1), strategies=(OptimizerInBackward(), MicroBatching(micro_batch_size=8))
    )
    fastest_measured(PlanClock(None, CPU), candidate(8, 1.0), Waiting(more))
    assert timed.run == [8, 8]


def test_of_plans_that_are_as_fast_the_one_that_was_estimated_first_stays(timed):
    timed.table |= {8: 1.0, 4: 1.0}
    chosen = fastest_measured(PlanClock(None, CPU), candidate(8, 1.0), Waiting(candidate(4, 1.1)))
    assert chosen.strategies == (MicroBatching(micro_batch_size=8),)


def test_smaller_micro_batches_are_run_until_one_is_slower(timed):
    timed.table |= {8: 3.0, 4: 2.0, 2: 1.0, 1: 1.5}
    search = Waiting()
    search.smaller |= {8: candidate(4, 9.0), 4: candidate(2, 9.0), 2: candidate(1, 9.0)}
    chosen = fastest_measured(PlanClock(None, CPU), candidate(8, 1.0), search)
    assert chosen.strategies == (MicroBatching(micro_batch_size=2),)
    assert timed.run == [8, 8, *(8, 4) * 2, *(4, 2) * 2, 2, 1]


def test_of_several_that_may_be_faster_the_fastest_is_held_against_the_plan_again(timed):
    timed.table |= {8: 3.0, 4: 2.5, 3: 2.0, 2: 2.2}
    search = Waiting()
    search.smaller |= {8: [candidate(4, 9.0), candidate(3, 9.0)], 3: [candidate(2, 9.0)]}
    chosen = fastest_measured(PlanClock(None, CPU), candidate(8, 1.0), search)
    assert chosen.strategies == (MicroBatching(micro_batch_size=3),)
    assert chosen.prediction.step_seconds == 2.0
    assert timed.run == [8, 8, 8, 4, 3, 8, 3, 3, 2]


def test_what_may_be_faster_is_half_a_batch_one_cheap_strategy_more_and_one_less():
    fused = OptimizerImplementation(implementation="fused")
    loop = OptimizerImplementation(implementation="loop")
    in_backward, chunked = OptimizerInBackward(), LossChunking(num_candidates=64)
    halves = tuple(MicroBatching(micro_batch_size=size) for size in (4, 2))
    recomputed = ActivationCheckpointing(blocks=("0",))
    options = ((None, FusedAttention()), (fused, loop), (None, in_backward), (None, chunked))
    space = SearchSpace(options=options, splits=halves, must_split=False, refused=())
    neighbours = Neighbours(space, {"loss-chunking": "it was refused"})

    def around(*strategies):
        return set(neighbours.perhaps_faster(in_catalogue_order(strategies)))

    # The implementation is required, and attention is not said to cost little.
    assert around(fused) == {(fused, halves[0]), (fused, in_backward)}
    # Pieces and an optimizer in the backward do not go together; smaller ones may need no blocks.
    smaller = {(fused, recomputed, halves[1]), (fused, halves[1])}
    assert around(fused, recomputed, halves[0]) == smaller
    assert around(fused, in_backward, recomputed) == {(fused, recomputed)}
    plain = SearchSpace(options=((None, fused),), splits=(), must_split=False, refused=())
    assert list(Neighbours(plain, {}).perhaps_faster((fused,))) == [()]


def test_pieces_that_are_kept_give_way_to_smaller_ones_as_any_do():
    sizes = tuple(CachedGradients(micro_batch_size=size) for size in (8, 4, 2))
    space = SearchSpace(options=(), splits=sizes, must_split=True, refused=())
    assert space.allows([sizes[1].keeping(1)])
    assert not space.allows([])
    assert Neighbours(space, {}).halved((sizes[1].keeping(1),)) == (sizes[2],)


def test_where_the_time_is_over_the_fastest_at_first_sight_is_chosen(timed):
    timed.table |= {8: 2.0, 4: 1.5, 2: 1.0}
    search = Waiting(candidate(4, 1.1), candidate(2, 1.1), over_after=1)
    search.smaller |= {4: candidate(2, 1.0)}
    chosen = fastest_measured(PlanClock(None, CPU), candidate(8, 1.0), search)
    assert chosen.strategies == (MicroBatching(micro_batch_size=4),)
    assert chosen.prediction.step_seconds == 1.5
    assert timed.run == [8, 8, 4]


@pytest.mark.parametrize(("seconds", "size"), [(0.98, 8), (0.96, 4)])
def test_smaller_micro_batches_are_taken_only_if_they_are_clearly_faster(timed, seconds, size):
    timed.table |= {8: 1.0, 4: seconds}
    search = Waiting()
    search.smaller |= {8: candidate(4, 9.0)}
    chosen = fastest_measured(PlanClock(None, CPU), candidate(8, 1.0), search)
    assert chosen.strategies == (MicroBatching(micro_batch_size=size),)


def test_smaller_micro_batches_that_are_faster_once_are_not_taken(monkeypatch):
    small_seconds = iter((0.9, 0.99))

    def time_plans(job, plans, device, known, num_rounds=5, enough_seconds=0.0, all_fit=False):
        sizes = [plan.strategies[0].micro_batch_size for plan in plans]
        return [1.0 if size == 8 else next(small_seconds) for size in sizes]

    monkeypatch.setattr(measured, "time_plans", time_plans)
    search = Waiting()
    search.smaller |= {8: candidate(4, 9.0)}
    chosen = fastest_measured(PlanClock(None, CPU), candidate(8, 1.0), search)
    assert chosen.strategies == (MicroBatching(micro_batch_size=8),)
    assert next(small_seconds, None) is None


def test_a_machine_that_has_slowed_down_since_does_not_hide_the_fastest_plan(monkeypatch):
    slowness = iter((1.0, 2.0, 1.0))

    def time_plans(job, plans, device, known, num_rounds=5, enough_seconds=0.0, all_fit=False):
        slow = next(slowness)
        return [slow * {8: 1.0, 4: 0.8}[plan.strategies[0].micro_batch_size] for plan in plans]

    monkeypatch.setattr(measured, "time_plans", time_plans)
    chosen = fastest_measured(PlanClock(None, CPU), candidate(8, 1.0), Waiting(candidate(4, 1.0)))
    assert chosen.strategies == (MicroBatching(micro_batch_size=4),)


@pytest.mark.parametrize(
    ("free_share", "sizes"),
    [(10.0, (10, 2)), (1.26, (10, 2)), (1.0, (5, 1)), (0.32, (2, 1)), (0.001, (1,))],
)
def test_operators_are_timed_on_a_batch_that_fits(regression_job, monkeypatch, free_share, sizes):
    plain = record(regression_job)
    peak_bytes = measured.evaluate(regression_job, plain, CPU, measured.Plan()).peak_allocated_bytes
    run = []

    def time_operators(job, device, batch_sizes) -> OperatorTimes:
        run.append(batch_sizes)
        return OperatorTimes(device=device)

    monkeypatch.setattr(measured, "time_operators", time_operators)
    monkeypatch.setattr(measured, "free_memory_bytes", lambda: int(free_share * peak_bytes))
    measured_times(regression_job, CPU, plain)
    assert run == [sizes]


def test_a_device_that_is_not_here_is_refused_and_the_cpu_is_always_here(monkeypatch):
    check_is_here(CPU)
    monkeypatch.setattr(measured, "current_device_name", lambda: "a100-40gb")
    with pytest.raises(DeviceUnavailableError, match="this machine is a100-40gb"):
        check_is_here(T4)
    monkeypatch.setattr(measured, "current_device_name", lambda: "t4")
    check_is_here(T4)
