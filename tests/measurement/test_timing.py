"""Steps and operators are really run and timed."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from memfit import Job, Plan
from memfit.cost.operator_times import OperatorTimes
from memfit.devices.catalogue import load_device
from memfit.measurement import timing
from memfit.measurement.timing import time_operators, time_plans
from memfit.prediction.recording import record
from memfit.separation.separation import Separation
from memfit.session.batches import find_layout
from memfit.strategies.micro_batching import MicroBatching

CPU = load_device("cpu")


def job(batch_size: int = 64) -> Job:
    return Job(
        model=lambda: nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)),
        batch=lambda size: torch.randn(size, 64),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=batch_size,
    )


@pytest.mark.slow
def test_timed_operators_add_up_to_the_shortest_step(monkeypatch):
    shortest = iter((9.0, 9.0, 5.0, 3.0, 7.0, 8.0))  # of three rounds
    monkeypatch.setattr(timing, "shortest_step", lambda run, batch: next(shortest))
    steady = record(job()).steady
    times = time_operators(job(), CPU, [64])
    assert all(times.seconds(operation) > 0 for operation in steady.operations)
    assert {operation.signature for operation in steady.operations} <= set(times.measured_seconds)
    assert times.step_seconds(steady) == pytest.approx(3.0)


@pytest.mark.slow
def test_a_round_on_a_slow_machine_counts_for_nothing(monkeypatch):
    """Machines that others share change their speed for seconds at a time."""
    measure, rounds = timing._timed_operators, []

    def slowed(*args):
        found = measure(*args)
        rounds.append(found)
        slowness = 10.0 if len(rounds) != 2 else 1.0
        timed = [(operation, slowness * seconds) for operation, seconds in found.timed]
        return replace(found, timed=timed, steps_seconds=slowness * found.steps_seconds)

    monkeypatch.setattr(timing, "_timed_operators", slowed)
    monkeypatch.setattr(timing, "_ENOUGH_ROUND_SECONDS", 1e9)  # this machine may be slow as well
    times = time_operators(job(), CPU, [64])
    assert len(rounds) == 3
    assert times.step_seconds(record(job()).steady) == pytest.approx(rounds[1].steps_seconds / 2)


def test_the_shortest_of_a_few_steps_is_taken(monkeypatch):
    clock = iter((0.0, 0.5, 1.0, 1.2, 2.0, 2.4))
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    seconds = timing.shortest_step(SimpleNamespace(step=lambda batch: None), None)
    assert seconds == pytest.approx(0.2)
    assert next(clock, None) is None


def test_long_steps_are_not_repeated(monkeypatch):
    clock = iter((0.0, 2.5, 3.0, 3.1))
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert timing.shortest_step(SimpleNamespace(step=lambda batch: None), None) == 2.5
    assert next(clock) == 3.0


@pytest.mark.slow
def test_of_several_sizes_the_first_adds_up_to_its_step(monkeypatch):
    shortest = cycle((5.0, 3.0, 9.0, 9.0))
    monkeypatch.setattr(timing, "shortest_step", lambda run, batch: next(shortest))
    times = time_operators(job(), CPU, [64, 16])
    assert times.step_seconds(record(job()).steady) == pytest.approx(3.0)
    smaller = record(job(16)).steady
    assert all(o.signature in times.measured_seconds for o in smaller.operations)


@pytest.mark.slow
def test_operators_of_a_smaller_batch_say_how_long_those_of_a_larger_one_take():
    larger = record(job(256)).steady
    times = time_operators(job(), CPU, [64])
    assert any(o.signature not in times.measured_seconds for o in larger.operations)
    assert all(times.seconds(operation) > 0 for operation in larger.operations)
    assert times.step_seconds(larger) > times.step_seconds(record(job()).steady)


@pytest.mark.slow
def test_measured_times_are_not_those_of_the_roofline():
    steady = record(job()).steady
    measured, guessed = time_operators(job(), CPU, [64]), OperatorTimes(device=CPU)
    assert measured.step_seconds(steady) != guessed.step_seconds(steady)


@pytest.mark.slow
def test_plans_are_timed_in_the_order_given():
    pieces = Plan(strategies=(MicroBatching(micro_batch_size=1),))
    for plans in ([Plan(), pieces], [pieces, Plan()]):
        seconds = time_plans(job(), plans, CPU)
        assert len(seconds) == 2
        assert (seconds[0] < seconds[1]) == (plans[1] is pieces)
        assert min(seconds) > 0


@pytest.mark.slow
def test_a_plan_that_is_far_slower_is_not_run_again(monkeypatch):
    steps = iter((1.0, 1.1, 1.2, 0.9, 1.2, 1.1, 0.95, 1.05))
    monkeypatch.setattr(timing, "shortest_step", lambda run, batch: next(steps))
    seconds = time_plans(job(), [Plan(), Plan(), Plan()], CPU)
    assert seconds == pytest.approx([1.0, (1.1 + 1.2 / 0.9) / 2, 1.2])
    assert next(steps, None) is None


@pytest.mark.slow
def test_a_machine_that_slows_down_for_some_turns_makes_no_plan_slower(monkeypatch):
    steps = iter((1.7, 2.21, 1.0, 1.0, 1.0, 1.0))
    monkeypatch.setattr(timing, "shortest_step", lambda run, batch: next(steps))
    first, second = time_plans(job(), [Plan(), Plan()], CPU)
    assert second / first == pytest.approx(1.3)


@pytest.mark.slow
def test_what_is_known_of_pieces_is_not_looked_into_again(monkeypatch):
    pieces, looked_into = Plan(strategies=(MicroBatching(micro_batch_size=4),)), []
    known = Separation(job(), find_layout(job()))
    assert known.of(4).is_proved
    found = Separation._found

    def noted(separation, *args):
        looked_into.append(args)
        return found(separation, *args)

    monkeypatch.setattr(Separation, "_found", noted)
    time_plans(job(), [pieces, pieces], CPU, known=known, num_rounds=2)
    assert not looked_into
    time_plans(job(), [pieces], CPU, num_rounds=1)
    assert looked_into


def test_no_plans_take_no_time():
    assert time_plans(job(), [], CPU) == []
    assert turns_of(job(), 0) == []


@pytest.mark.slow
def test_timing_draws_nothing_from_the_random_state():
    before = torch.get_rng_state()
    time_operators(job(), CPU, [64])
    time_plans(job(), [Plan()], CPU)
    assert torch.equal(torch.get_rng_state(), before)


def turns_of(a_job: Job, num_plans: int) -> list[list[float]] | None:
    return timing.seconds_in_turns(a_job, [Plan()] * num_plans, "cpu", find_layout(a_job))


@pytest.mark.slow
def test_plans_take_turns_while_all_models_live(monkeypatch):
    stepped = []

    def timed(run, batch):
        stepped.append(id(run.model))
        return 0.01 * len(stepped)

    monkeypatch.setattr(timing, "seconds_of_step", timed)
    first, second = turns_of(job(), 2)
    one, other = stepped[:2]
    assert one != other
    assert stepped == [one, other, *[one, one, other, other] * 4]  # after a first step of each
    assert first == pytest.approx([0.03, 0.07, 0.11, 0.15])  # the shorter of two steps
    assert second == pytest.approx([0.05, 0.09, 0.13, 0.17])


@pytest.mark.slow
def test_long_steps_take_fewer_turns(monkeypatch):
    monkeypatch.setattr(timing, "seconds_of_step", lambda run, batch: 0.6)
    assert turns_of(job(), 2) == [[0.6, 0.6], [0.6, 0.6]]


@pytest.mark.slow
def test_turns_begin_with_the_same_weights_and_share_one_batch(monkeypatch):
    weights, batches = [], []

    def timed(run, batch):
        weights.append(next(run.model.parameters()).detach().clone())
        batches.append(batch)
        return 0.6

    drawn = iter([torch.ones(64, 64), torch.zeros(2, 64)])
    monkeypatch.setattr(timing, "seconds_of_step", timed)
    monkeypatch.setattr(timing, "real_batch", lambda job, size: next(drawn))
    turns_of(job(), 2)
    assert torch.equal(*weights[:2])
    assert all(batch is batches[0] for batch in batches)


@pytest.mark.slow
def test_a_model_that_lives_already_is_timed_by_itself():
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    living = replace(job(), model=lambda: model)
    before = [parameter.clone() for parameter in model.parameters()]
    assert turns_of(living, 2) is None
    assert len(time_plans(living, [Plan(), Plan()], CPU, num_rounds=1, all_fit=True)) == 2
    assert all(map(torch.equal, before, model.parameters()))
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.slow
def test_a_living_part_of_a_model_is_enough_to_time_it_by_itself():
    encoder = nn.Linear(64, 256)
    parts = replace(job(), model=lambda: nn.Sequential(encoder, nn.Tanh(), nn.Linear(256, 64)))
    before = encoder.weight.clone()
    assert turns_of(parts, 2) is None
    assert torch.equal(before, encoder.weight)


@pytest.mark.slow
def test_turns_leave_random_states_and_buffers_as_they_were():
    norm = nn.BatchNorm1d(64)
    drawing = replace(
        job(),
        model=lambda: nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)),
        loss=lambda model, batch: norm(model(batch)).square().mean(),
    )
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    assert turns_of(drawing, 2) is not None
    assert torch.equal(expected, torch.rand(4))
    assert int(norm.num_batches_tracked) == 0
    assert torch.equal(norm.running_mean, torch.zeros(64))


@pytest.mark.slow
def test_turns_are_short_only_where_all_plans_fit(monkeypatch):
    alone = []
    monkeypatch.setattr(timing, "shortest_step", lambda run, batch: alone.append(run) or 1.0)
    time_plans(job(), [Plan(), Plan()], CPU, num_rounds=1, all_fit=True)
    assert not alone
    time_plans(job(), [Plan(), Plan()], CPU, num_rounds=1, all_fit=False)
    assert len(alone) == 2


def test_a_plan_that_falls_behind_takes_no_more_turns(monkeypatch):
    rounds = iter([[[1.0, 1.0], [2.0, 2.0], [1.1, 1.1]], [[1.0, 2.0], [1.1, 2.2]]])
    asked = []

    def in_turns(job, plans, *_rest):
        asked.append(len(plans))
        return next(rounds)

    monkeypatch.setattr(timing, "seconds_in_turns", in_turns)
    seconds = time_plans(job(), [Plan()] * 3, CPU, num_rounds=2, all_fit=True)
    assert asked == [3, 2]
    assert seconds == pytest.approx([1.0, 2.0, 1.1])
