"""A step that runs out of memory leaves nothing behind, wherever in it that was."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.runtime.guard_faults import (
    BATCH_SIZE,
    NUM_STEPS,
    OutOfMemoryAt,
    batches_of,
    build_job,
    everything,
    ladder_of,
    same,
    trained,
    update_cut,
    without_dropout,
)

import memfit
from memfit import Plan
from memfit.errors import OutOfMemoryAfterAllError, UndoFailedError, UpdateCutError
from memfit.observe.enforced_budget import EnforcedBudget
from memfit.observe.out_of_memory import has_lost_context, is_out_of_memory
from memfit.runtime.guard import state_file, step_entry, step_log
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.optimizer_implementation import OptimizerImplementation
from memfit.strategies.optimizer_in_backward import OptimizerInBackward

pytestmark = pytest.mark.usefixtures("small_heap", "unhurried_log")

SMALLEST = Plan(strategies=(MicroBatching(micro_batch_size=1),))
PLANS = {
    "as it is": (),
    "fused": (OptimizerImplementation(implementation="fused"),),
    "checkpointed": (ActivationCheckpointing(blocks=("4",)),),
    "updated in backward": (OptimizerInBackward(),),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_wherever_a_step_fails_training_ends_as_if_it_had_not(name):
    job = build_job(batch_norm=name != "updated in backward")
    plan = ladder_of(*PLANS[name])
    _, wanted, operators = trained(job, plan)
    points = random.Random(0).sample(range(1, len(operators) + 1), 20)
    num_events = num_repeated = 0
    for point in points:
        run, found, seen = trained(job, plan, point)
        same(found, wanted)
        assert len(seen) > len(operators), "something was done again"
        # A failure in what the guard itself does is none of the step's.
        assert len(run.events) <= 1
        num_events += len(run.events)
        num_repeated += sum(event.num_steps_repeated for event in run.events)
        run.close()
    assert num_events >= 5
    assert num_repeated >= 1 or name == "fused", "some update was cut, if it has parts"


@pytest.mark.slow
def test_buffers_that_are_too_large_to_copy_come_back_with_the_file(monkeypatch):
    monkeypatch.setattr(step_entry, "_MOST_COPIED_BYTES", 0)
    job, plan = build_job(), ladder_of()
    _, wanted, operators = trained(job, plan)
    (place,) = [n for n, name in enumerate(operators, 1) if "log_softmax_backward" in name][3:4]
    run, found, _ = trained(job, plan, place)
    assert [(event.step, event.num_steps_repeated) for event in run.events] == [(4, 3)]
    same(found, wanted)
    run.close()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("_MOST_STEPS", "more than 0 steps"),
        ("_MOST_BATCH_BYTES", "batches since the file was written take more"),
        ("_FREE_SECONDS", "storing the batches .* takes too much time"),
    ],
)
def test_when_more_was_done_than_is_kept_a_cut_update_is_said(monkeypatch, name, reason):
    monkeypatch.setattr(step_log, name, -1e9 if name == "_FREE_SECONDS" else 0)
    job = build_job()
    with memfit.start(job, ladder_of()) as run:
        first, second, third = batches_of(job)[:3]
        run.step(first)
        run._guard._log._write_seconds = 1e9
        run.step(second)
        with update_cut(reason):
            run.step(third)


@pytest.mark.slow
def test_several_failures_in_a_row_are_undone_as_well():
    job, plan = build_job(), ladder_of()
    _, wanted, operators = trained(job, plan)
    draw = random.Random(1)
    for _ in range(10):
        points = draw.sample(range(1, 2 * len(operators)), 4)
        run, found, _ = trained(job, plan, *points)
        same(found, wanted)
        run.close()


def fails_at_reading_back(monkeypatch, error: BaseException) -> None:
    def read_back(*_args):
        raise error

    monkeypatch.setattr(state_file.StateFile, "read_back", read_back)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), UndoFailedError),
        (OSError("the disk is gone"), OSError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=["memory", "disk", "Ctrl-C"],
)
def test_a_run_whose_step_could_not_be_undone_takes_no_more_steps(monkeypatch, error, told):
    job, plan = build_job(), ladder_of()
    run, _, _ = trained(job, plan)
    saved = copy.deepcopy(run.state_dict())
    batch = batches_of(job)[0]
    with OutOfMemoryAt() as seen:
        run.step(batch)
    last = max(n for n, name in enumerate(seen.seen, 1) if "addcdiv" in name)
    fails_at_reading_back(monkeypatch, error)
    with pytest.raises(told), OutOfMemoryAt(last):
        run.step(batch)
    for _ in range(2):
        with pytest.raises(UndoFailedError, match=r"undoing it failed.*takes no more steps"):
            run.step(batch)
    monkeypatch.undo()
    run.load_state_dict(saved)
    run.step(batch)
    run.close()


@pytest.mark.slow
def test_gradients_that_could_not_be_dropped_are_not_added_to():
    job, plan = build_job(), ladder_of()
    _, wanted, operators = trained(job, plan)
    enters = [n for n, name in enumerate(operators, 1) if "record_function_enter" in name]
    assert len(enters) == 2 * NUM_STEPS, "one in the update, one where gradients are dropped"
    run, found, _ = trained(job, plan, enters[5])
    assert [event.step for event in run.events] == [3]
    same(found, wanted)
    run.close()


@pytest.mark.slow
def test_a_step_goes_on_in_smaller_micro_batches_where_there_is_no_ladder():
    job = without_dropout()
    _, wanted, operators = trained(job, Plan())
    run, found, _ = trained(job, Plan(), len(operators) // 2)
    (event,) = run.events
    assert event.next_plan == ("micro-batching(4)",)
    assert run.plan.labels() == ("micro-batching(4)",)
    same(found, wanted, tolerance=1e-5)


@pytest.mark.slow
def test_batch_normalisation_goes_on_with_the_statistics_of_the_whole_batch():
    job = build_job()
    _, _, operators = trained(job, Plan())
    run, _, _ = trained(job, Plan(), len(operators) // 2)
    assert run.plan.labels() == ("batchnorm-replay(4)",)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("HIP out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_running_out_of_memory_is_told_from_other_errors(error, is_one):
    assert is_out_of_memory(error) is is_one
    wrapped = RuntimeError("the loss failed")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) is is_one


def test_a_lost_context_is_no_reason_to_try_again():
    assert has_lost_context(RuntimeError("CUDA error: device-side assert triggered"))
    assert not has_lost_context(torch.OutOfMemoryError("CUDA out of memory."))


def test_other_errors_pass_through():
    job = build_job()
    with memfit.start(job, Plan(), guard=True) as run:
        with pytest.raises(Exception, match="shapes cannot be multiplied"):
            run.step((torch.randn(8, 7), torch.zeros(8, dtype=torch.int64)))
        assert run.events == ()


@pytest.mark.slow
def test_when_nothing_is_smaller_the_state_is_that_of_before_the_step():
    job = build_job(batch_norm=False)
    with memfit.start(job, SMALLEST, guard=True) as run:
        batch = job.batch(BATCH_SIZE)
        run.step(batch)
        before, draws = copy.deepcopy(run.state_dict()), torch.get_rng_state()
        fault = OutOfMemoryAt(name="log_softmax_backward")
        with pytest.raises(OutOfMemoryAfterAllError, match="one sample already") as caught, fault:
            run.step(batch)
        assert "Step 2" in str(caught.value)
        assert caught.value.exit_code == 4
        assert torch.equal(torch.get_rng_state(), draws)
        after = run.state_dict()
        same(after["model"], before["model"])
        for number, state in before["optimizer"]["state"].items():
            same(after["optimizer"]["state"][number], state)
        assert after["num_steps"] == 1


@pytest.mark.slow
def test_a_state_that_was_loaded_is_what_a_cut_update_goes_back_to():
    job, plan = build_job(), ladder_of()
    batches = batches_of(job)
    first = memfit.start(job, plan, guard=True)
    first.step(batches[0])
    saved = copy.deepcopy(first.state_dict())
    ends = []
    for name in (None, "addcdiv"):
        with memfit.start(job, plan, guard=True) as run:
            run.step(batches[1])
            run.load_state_dict(copy.deepcopy(saved))
            torch.manual_seed(4)
            with OutOfMemoryAt(name=name, most=1):
                run.step(batches[2])
            assert len(run.events) == (name is not None)
            ends.append(copy.deepcopy(run.model.state_dict()))
    same(ends[1], ends[0])
    first.close()


@pytest.mark.slow
@pytest.mark.parametrize("most", [2, None])
def test_where_nothing_is_smaller_logged_steps_have_been_repeated(most):
    job = build_job(batch_norm=False)
    with memfit.start(job, SMALLEST, guard=True) as run:
        batches = batches_of(job)
        torch.manual_seed(5)
        run.step(batches[0])
        run.optimizer.param_groups[0]["lr"] = 0.01
        before = everything(run)
        fault = OutOfMemoryAt(name="addcdiv", most=most)
        if most is None:  # not even the steps before it can be repeated
            with pytest.raises(UpdateCutError, match=r"Step 2.*ran out again while"), fault:
                run.step(batches[1])
        else:
            with pytest.raises(OutOfMemoryAfterAllError, match="Step 2 "), fault:
                run.step(batches[1])
            same(everything(run), before)


def test_without_room_for_the_file_training_goes_on_and_a_cut_update_is_said(monkeypatch):
    monkeypatch.setattr(state_file, "_MOST_DISK_FRACTION", 1e-12)
    job, plan = build_job(), ladder_of()
    with memfit.start(job, plan, guard=True) as run:
        batch = job.batch(BATCH_SIZE)
        with OutOfMemoryAt(name="log_softmax_backward", most=1):
            run.step(batch)
        assert len(run.events) == 1, "what failed before the update needs no file"
        with update_cut(r"Step 2.*in part.*TMPDIR") as caught:
            run.step(batch)
        assert caught.value.exit_code == 4


def test_a_rung_that_cannot_be_applied_leaves_nothing_of_itself_behind():
    job = build_job()
    impossible = Plan(
        strategies=(
            ActivationCheckpointing(blocks=("4",)),
            MicroBatching(micro_batch_size=4),  # refused: there is batch normalisation
        )
    )
    with memfit.start(job, Plan(ladder=(impossible, Plan())), guard=True) as run:
        forward = run.model[4].forward
        with OutOfMemoryAt(name="log_softmax_backward", most=1):
            run.step(job.batch(BATCH_SIZE))
        assert run.plan.labels() == ()
        assert run.model[4].forward == forward


# --- A budget that is enforced ---


def test_an_enforced_budget_counts_live_tensors_alone():
    held = torch.randn(100)
    with EnforcedBudget(10_000) as budget:
        budget.watch([held])
        for _ in range(50):
            torch.randn(500).sum()
        assert budget.live_bytes == 400
        assert 2400 <= budget.highest_bytes <= 2404
        with pytest.raises(torch.OutOfMemoryError, match=r"randn.* over the enforced budget"):
            torch.randn(5000)
        view = torch.randn(1000).view(10, 100)
        assert budget.live_bytes == 400 + view.nbytes


@pytest.mark.slow
def test_training_fits_an_enforced_budget_by_going_down_the_ladder():
    job = replace(build_job(batch_norm=False), batch_size=64)
    batches = [job.batch(64) for _ in range(NUM_STEPS)]

    def highest_bytes(budget_bytes: int) -> tuple[Any, int]:
        with memfit.start(job, Plan(), guard=True) as run, EnforcedBudget(budget_bytes) as budget:
            budget.watch(run.model.parameters())
            for batch in batches:
                run.step(batch)
        assert run.num_steps == NUM_STEPS
        return run, budget.highest_bytes

    free, most_bytes = highest_bytes(10**9)
    tight, _ = highest_bytes(int(0.8 * most_bytes))
    assert not free.events
    assert tight.events
    assert tight.plan.labels()[0].startswith("micro-batching(")
