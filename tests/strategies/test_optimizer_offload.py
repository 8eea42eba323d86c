"""States on the host change nothing but where they are: results, checkpoints, failures, undoing."""

from __future__ import annotations

import copy
import os
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.conformance.builders import near_peak, residual
from tests.conformance.entries_optimizer import large_parameters
from tests.runtime import sharded_ranks
from tests.runtime.guard_faults import build_job, ladder_of, same
from tests.runtime.guard_faults import trained as trained_with_faults
from tests.strategies.optimizer_jobs import OPTIMIZERS, Foreign, tied_job, trained, with_own_step
from tests.zoo.small_jobs import facts_of, mean_square_job, session_of
from torch import nn
from torch.optim.lr_scheduler import StepLR

import memfit
from memfit import Job, Plan
from memfit.cost.operator_times import OperatorTimes
from memfit.cost.transfers import DISK_BYTES_PER_SECOND
from memfit.devices.catalogue import load_device
from memfit.errors import DataError
from memfit.observe.enforced_budget import EnforcedBudget
from memfit.prediction.recording import record
from memfit.prediction.waiting import waited_seconds
from memfit.runtime.planned_steps import apply_strategies, undo_all
from memfit.strategies import (
    Fp16,
    MicroBatching,
    OptimizerInBackward,
    OptimizerOffload,
)

EVERYTHING = OptimizerOffload(to="disk", min_tensor_bytes=1)
OFFLOADED = Plan(strategies=(EVERYTHING,))


def assert_same_bits(first: memfit.Run, second: memfit.Run) -> None:
    """Compare parameters and checkpoints of two runs, tensors by their bits."""
    flat = torch.utils._pytree.tree_flatten
    expected, shape = flat((first.model.state_dict(), first.optimizer.state_dict()))
    found, same_shape = flat((second.model.state_dict(), second.optimizer.state_dict()))
    assert shape == same_shape
    for one, other in zip(expected, found, strict=True):
        is_equal = torch.equal if isinstance(one, torch.Tensor) else lambda a, b: a == b
        assert is_equal(one, other)


def states_of(optimizer) -> list[torch.Tensor]:
    held = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in held if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"sgd-plain"}))
def test_every_optimizer_of_torch_gives_the_same_bits(name):
    job = tied_job(OPTIMIZERS[name])
    assert_same_bits(trained(job, Plan()), trained(job, OFFLOADED))


def test_counts_of_steps_stay_where_optimizers_look_for_them_when_they_are_loaded():
    """Adagrad asks its states for them before anything that is held back is there again."""
    job = tied_job(partial(torch.optim.Adagrad, lr=0.1))
    kept = trained(job, OFFLOADED)
    with memfit.start(job, OFFLOADED) as other:
        other.load_state_dict(copy.deepcopy(kept.state_dict()))
        assert_same_bits(kept, other)


def sparse_job() -> Job:
    return Job(
        model=lambda: nn.Embedding(12, 6, sparse=True),
        batch=torch.arange,
        loss=lambda model, ids: model(ids).square().mean(),
        optimizer=partial(torch.optim.SparseAdam, lr=0.1),
        batch_size=8,
    )


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))

    def forward(self, x):
        return (x @ self.weight.abs()).square()


def complex_job() -> Job:
    return replace(
        residual(width=6),
        model=Complex,
        loss=lambda model, batch: model(batch[0]).mean(),
        optimizer=partial(torch.optim.AdamW, lr=0.1),
    )


def half_frozen_job() -> Job:
    def model():
        built = nn.Sequential(
            nn.Linear(8, 8), nn.Linear(8, 8).to(memory_format=torch.preserve_format)
        )
        built[0].requires_grad_(False)
        return built

    return replace(residual(), model=model, optimizer=partial(torch.optim.AdamW, lr=0.1))


def channels_last_job() -> Job:
    model = lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # noqa: E731
    return mean_square_job(model, 3, 6, 6, optimizer=partial(torch.optim.AdamW, lr=0.1))


def clipped_job() -> Job:
    return replace(tied_job(), clip_grad_norm=0.01)


def muon_job() -> Job:
    muon = lambda parameters: torch.optim.Muon(  # noqa: E731
        [parameter for parameter in parameters if parameter.dim() == 2], lr=0.1
    )
    return replace(residual(), optimizer=muon)


@pytest.mark.parametrize(
    "job", [sparse_job, complex_job, half_frozen_job, channels_last_job, clipped_job, muon_job]
)
def test_parameters_and_gradients_of_every_kind_give_the_same_bits(job):
    runs = trained(job(), Plan()), trained(job(), OFFLOADED)
    assert_same_bits(*runs)
    strides = [[state.stride() for state in states_of(run.optimizer)] for run in runs]
    assert strides[0] == strides[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "others",
    [(Fp16(),), (OptimizerInBackward(),), (MicroBatching(micro_batch_size=4),)],
    ids=lambda others: others[0].name,
)
def test_with_other_strategies_it_changes_nothing_either(others):
    job = replace(residual(), optimizer=OPTIMIZERS["adamw"])
    without, plan = Plan(strategies=others), Plan(strategies=(EVERYTHING, *others))
    assert_same_bits(trained(job, without), trained(job, plan))


@pytest.mark.slow
def test_states_are_in_no_memory_of_the_device_but_those_of_one_parameter():
    job, plan = large_parameters(), Plan(strategies=(OptimizerOffload(to="disk"),))
    plain, planned = memfit.predict(job), memfit.predict(job, plan=plan)
    measured = memfit.measure(job, plan)
    assert planned.peak_allocated_bytes == near_peak(measured.peak_allocated_bytes)
    matrix_bytes = 256 * 512 * 4
    assert planned.disk_bytes == 2 * 12 * matrix_bytes
    assert planned.by_category["optimizer state"] < matrix_bytes
    saved_bytes = plain.peak_allocated_bytes - planned.peak_allocated_bytes
    assert saved_bytes > planned.disk_bytes - 4 * matrix_bytes


@pytest.mark.slow
def test_a_run_keeps_to_an_enforced_budget_that_the_states_would_break():
    job, plan = large_parameters(), Plan(strategies=(OptimizerOffload(to="disk"),))
    budget = int(1.03 * memfit.predict(job, plan=plan).peak_allocated_bytes)
    assert budget < 0.6 * memfit.predict(job).peak_allocated_bytes
    with memfit.start(job, plan) as run, EnforcedBudget(budget):
        for _ in range(3):
            run.step(job.batch(job.batch_size))
        assert not run.events


@pytest.mark.slow
def test_on_a_gpu_states_wait_in_pinned_memory_of_powers_of_two():
    job = replace(residual(width=96), optimizer=OPTIMIZERS["adamw"])
    plan = Plan(strategies=(OptimizerOffload(min_tensor_bytes=1024),))
    predicted = memfit.predict(job, "a100-40gb", plan)
    # Of eight matrices of 96 x 192, two states each; a vector has fewer than 1024 bytes.
    assert predicted.host_bytes == 8 * 2 * 2**17
    assert predicted.by_category["optimizer state"] < 2**17


@pytest.mark.slow
def test_the_step_waits_for_disk_and_link_whole():
    job = replace(residual(width=96), optimizer=OPTIMIZERS["adamw"])
    moved_bytes = 2 * 8 * 2 * 96 * 192 * 4
    for name, to in (("cpu", "disk"), ("a100-40gb", "host")):
        device = load_device(name)
        strategy = OptimizerOffload(to=to, min_tensor_bytes=1024)
        recording = record(job, Plan(strategies=(strategy,)), device=device)
        seconds = waited_seconds(recording, device, OperatorTimes(device=device))
        rate = DISK_BYTES_PER_SECOND if to == "disk" else device.value("link_bytes_per_second")
        assert seconds == moved_bytes / rate


@pytest.mark.slow
def test_checkpoints_are_those_of_the_optimizer_and_go_on_either_way():
    job = tied_job()
    plain, offloaded = (trained(job, plan, num_steps=2) for plan in (Plan(), OFFLOADED))
    assert_same_bits(plain, offloaded)
    goal = trained(job, Plan(), num_steps=3)
    for source in (plain, offloaded):
        for plan in (Plan(), OFFLOADED):
            run = memfit.start(job, plan)
            run.load_state_dict(copy.deepcopy(source.state_dict()))
            run.step(job.batch(job.batch_size))
            assert_same_bits(goal, run)


def test_what_is_loaded_takes_no_memory_of_the_device_before_the_next_step():
    job = tied_job()
    saved = copy.deepcopy(trained(job, Plan()).optimizer.state_dict())
    session = session_of(job)
    (undo,) = apply_strategies(session, OFFLOADED.strategies)
    session.optimizer.load_state_dict(saved)
    states = states_of(session.optimizer)
    assert any(state.dim() for state in states)
    assert all(session.spill.holds(state) == bool(state.dim()) for state in states)
    undo()


def test_a_saved_state_has_no_more_bytes_than_its_values(tmp_path):
    job = tied_job()
    sizes = []
    for plan in (Plan(), OFFLOADED):
        path = tmp_path / "state.pt"
        torch.save(trained(job, plan).optimizer.state_dict(), path)
        sizes.append(path.stat().st_size)
    assert sizes[0] == sizes[1]


@pytest.mark.slow
@pytest.mark.usefixtures("small_heap", "unhurried_log")
@pytest.mark.parametrize("others", [(), (OptimizerInBackward(),)], ids=["alone", "in backward"])
def test_wherever_a_step_fails_training_ends_as_if_it_had_not(others):
    job, plan = build_job(batch_norm=not others), ladder_of(EVERYTHING, *others)
    _, wanted, operators = trained_with_faults(job, plan)
    inside = ("addcdiv", "lerp", "copy_", "empty_strided")
    updates = [n for n, name in enumerate(operators, 1) if any(each in name for each in inside)]
    draw = random.Random(0)
    cuts = 0
    for point in (*draw.sample(updates, 8), *draw.sample(range(1, len(operators) + 1), 6)):
        run, found, _ = trained_with_faults(job, plan, point)
        same(found, wanted)
        cuts += sum(event.num_steps_repeated for event in run.events)
        run.close()
    assert cuts >= 1


@pytest.mark.parametrize("is_early", [True, False])
def test_schedulers_and_hooks_see_one_step_per_step(is_early):
    calls, rates = [], []
    for plan in (Plan(), OFFLOADED):
        schedules = []

        def optimizer(parameters, schedules=schedules):
            built = torch.optim.AdamW(parameters, lr=0.1)
            if is_early:
                schedules.append(StepLR(built, step_size=2, gamma=0.1))
            return built

        job = tied_job(optimizer)
        run = trained(job, plan, num_steps=0)
        run.optimizer.register_step_pre_hook(
            lambda optimizer, *_: calls.append(optimizer.param_groups[0]["params"][0].grad.sum())
        )
        schedule = schedules[-1] if is_early else StepLR(run.optimizer, step_size=2, gamma=0.1)
        for _ in range(4):
            run.step(job.batch(job.batch_size))
            schedule.step()  # warns, which is an error here, where no step came before
            rates.append(run.optimizer.param_groups[0]["lr"])
    assert len(calls) == 8
    assert calls[:4] == calls[4:], "a hook before the step finds the gradients"
    assert rates[:4] == rates[4:]


def in_own_loop(
    plan: Plan, *, with_closure: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)  # has states from the beginning

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).square().mean()
        loss.backward()
        return loss

    with memfit.attach(model, optimizer, plan):
        for _ in range(3):
            if with_closure:
                assert optimizer.step(closure).requires_grad
            else:
                closure()
                optimizer.step()
    closure()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("with_closure", [False, True])
def test_a_loop_of_its_own_trains_the_same_and_gets_its_optimizer_back(with_closure):
    bare, _ = in_own_loop(Plan())
    model, optimizer = in_own_loop(OFFLOADED, with_closure=with_closure)
    assert torch.equal(bare.weight, model.weight)
    assert "step" not in vars(optimizer)
    assert not optimizer._optimizer_load_state_dict_post_hooks


def test_a_plan_that_follows_another_finds_the_states_on_the_host():
    job = tied_job()
    session = session_of(job)
    undos = apply_strategies(session, OFFLOADED.strategies)
    session.gradient_pass(session, job.batch(8), lambda phase: None)
    session.update(session)
    states, moved_bytes = states_of(session.optimizer), session.spill.file_bytes
    undo_all(undos)
    undos = apply_strategies(session, OFFLOADED.strategies)
    assert [*map(id, states_of(session.optimizer))] == [*map(id, states)]
    assert session.spill.file_bytes == moved_bytes
    undo_all(undos)
    session.update(session)
    assert not any(session.spill.holds(state) for state in states_of(session.optimizer))
    del states
    assert session.spill.disk_bytes == 0


def test_without_room_on_the_disk_the_run_ends_with_what_is_needed(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError, match=r"optimizer states cannot be written .*set TMPDIR"):
        trained(tied_job(), OFFLOADED)


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (torch.optim.LBFGS, "LBFGS may need the states of all parameters at once"),
        (partial(Foreign, lr=0.1, momentum=0.9), "Foreign may need"),
        (partial(torch.optim.SGD, lr=0.1), "keeps no states"),
        (partial(torch.optim.Adam, capturable=True), "is capturable"),
        (partial(torch.optim.Adam, differentiable=True), "is differentiable"),
        (with_own_step, "has a step function of its own"),
    ],
)
def test_optimizers_without_states_to_move_are_refused(optimizer, reason):
    job = replace(residual(), optimizer=optimizer)
    assert reason in str(EVERYTHING.obstacle(facts_of(job)))


@pytest.mark.slow
def test_the_planner_moves_states_where_nothing_else_fits():
    job = large_parameters()
    plain = memfit.predict(job)
    # Parameters and gradients stay; the states alone are nearly half of the peak.
    budget = plain.peak_allocated_bytes - plain.by_category["optimizer state"] // 2
    forbidden = ["optimizer-in-backward"]
    plan = memfit.plan(job, budget=budget, disk="1GiB", forbid=forbidden)
    assert "optimizer-offload" in {strategy.name for strategy in plan.strategies}
    assert plan.prediction.fits
    assert plan.prediction.disk_bytes > 0
    assert memfit.measure(job, plan).peak_allocated_bytes <= budget
    (remedy,) = (each for each in plan.remedies if each.strategy == "optimizer-offload")
    assert remedy.most_bytes >= plain.peak_allocated_bytes - plan.prediction.peak_allocated_bytes


@pytest.mark.slow
def test_clipping_schedules_and_uneven_pieces_end_as_plain_pytorch_on_the_whole_batch():
    plan = Plan(strategies=(EVERYTHING, MicroBatching(micro_batch_size=5)))
    with memfit.start(
        sharded_ranks.job_of(sharded_ranks.model, sharded_ranks.mean, 13), plan
    ) as run:
        scheduler = StepLR(run.optimizer, 2, gamma=0.5)
        for seed, size in enumerate(sharded_ranks.RAGGED):
            run.step(sharded_ranks.rows(size, seed))
            scheduler.step()
        found = run.model.state_dict()
    whole = sharded_ranks.expected(sharded_ranks.RAGGED, gamma=0.5)
    assert max(float((found[key] - whole[key]).abs().max()) for key in whole) <= 1e-12
