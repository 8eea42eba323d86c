"""What the guard does besides undoing steps: climb, keep its plan, rehearse, evaluate, save, refuse."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.runtime.guard_faults import (
    BATCH_SIZE,
    OutOfMemoryAt,
    batches_of,
    build_job,
    everything,
    ladder_of,
    same,
    trained,
    update_cut,
)
from tests.zoo.processes import run_python
from torch import nn
from torch.utils.data import DataLoader, Dataset

import memfit
from memfit import GuardSettings, Plan
from memfit.errors import (
    BatchChangedError,
    LostContextError,
    MemfitError,
    OutOfMemoryAfterAllError,
    UpdateCutError,
)
from memfit.journal.records import OutOfMemoryEvent
from memfit.observe.enforced_budget import EnforcedBudget
from memfit.runtime.largest_batch import largest_batch

pytestmark = pytest.mark.usefixtures("small_heap", "unhurried_log")

# --- Climbing back, and keeping the plan ---


@pytest.mark.slow
def test_after_enough_good_steps_the_plan_above_is_tried_again() -> None:
    job = build_job(batch_norm=False)
    with memfit.start(job, Plan(), guard=GuardSettings(climb_after_steps=3)) as run:
        batch = job.batch(BATCH_SIZE)
        labels = []
        for number in range(16):
            most = 1 if number in {1, 5} else 0
            with OutOfMemoryAt(name="log_softmax_backward", most=most):
                run.step(batch)
            labels.append(run.plan.labels() == ())
    small, large = [False], [True]
    # Three good steps below, one step above that fails; then the wait is six.
    assert labels == large + small * 3 + large + small * 6 + large * 5


@pytest.mark.slow
def test_what_is_trained_is_the_same_whether_or_not_the_plan_climbs() -> None:
    job, plan = build_job(), ladder_of()
    _, wanted, operators = trained(job, plan, settings=GuardSettings(climb_after_steps=0))
    run, found, _ = trained(
        job, plan, len(operators) // 3, settings=GuardSettings(climb_after_steps=1)
    )
    assert run.events
    same(found, wanted)


@pytest.mark.slow
def test_a_checkpoint_keeps_the_plan_that_was_found() -> None:
    job = build_job(batch_norm=False)
    first = memfit.start(job, Plan())
    with OutOfMemoryAt(name="log_softmax_backward", most=1):
        first.step(job.batch(BATCH_SIZE))
    saved = first.state_dict()
    resumed = memfit.start(job, Plan())
    resumed.load_state_dict(saved)
    assert resumed.plan.labels() == first.plan.labels() == ("micro-batching(4)",)
    other = memfit.start(job, Plan(strategies=resumed.plan.strategies[:1]))
    other.load_state_dict(saved)
    assert other.plan.labels() == ("micro-batching(4)",), "its own, which is the same"
    for run in (first, resumed, other):
        run.close()


# --- The largest batch first ---


@pytest.mark.slow
def test_a_rehearsal_finds_a_plan_and_changes_nothing_else() -> None:
    job = replace(build_job(batch_norm=False), batch_size=64)
    with memfit.start(job) as run:
        largest = job.batch(64)
        before = everything(run)
        with EnforcedBudget(18_000) as budget:
            budget.watch(run.model.parameters())
            result = run.rehearse(largest)
        assert run.events
        assert run.plan.labels()[0].startswith("micro-batching(")
        assert float(result.loss) > 0
        del before["python random"]
        after = everything(run)
        same({name: after[name] for name in before}, before)
        with EnforcedBudget(18_000) as budget:
            budget.watch(run.model.parameters())
            for _ in range(3):
                run.step(job.batch(64))
        assert len(run.events) == len({event.plan for event in run.events}), (
            "none after the rehearsal"
        )


class Sentences(Dataset):
    """Samples of different lengths; the longest two are 40 and 30."""

    lengths = (3, 40, 7, 9, 30, 2, 5, 11)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.lengths[index],), float(index))


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def test_the_largest_batch_of_a_loader_that_shuffles_is_made_of_the_largest_samples() -> None:
    draws = torch.get_rng_state()
    found = largest_batch(DataLoader(Sentences(), batch_size=2, shuffle=True, collate_fn=padded))
    assert found.batch.shape == (2, 40)
    assert set(found.batch[:, 0].tolist()) == {1.0, 4.0}
    assert found.is_bound
    assert torch.equal(torch.get_rng_state(), draws)


def test_without_shuffling_it_is_one_that_the_loader_really_gives() -> None:
    found = largest_batch(DataLoader(Sentences(), batch_size=2, collate_fn=padded))
    assert found.batch[:, 0].tolist() == [0.0, 1.0]
    assert found.is_bound


def test_what_cannot_be_read_by_index_is_looked_at_batch_by_batch() -> None:
    found = largest_batch(torch.zeros(4, size) for size in (2, 9, 3))
    assert found.batch.shape == (4, 9)
    assert (found.num_samples_seen, found.is_bound) == (3, False)
    with pytest.raises(MemfitError, match="gives no batches"):
        largest_batch([])


# --- Evaluation ---


@pytest.mark.slow
def test_an_evaluation_that_does_not_fit_is_done_in_pieces() -> None:
    job = replace(build_job(), batch_size=64)
    with memfit.start(job) as run:
        batch = job.batch(64)
        whole = run.evaluate(batch)
        outputs = run.evaluate(batch, lambda model, batch: {"scores": model(batch[0])})["scores"]
        told: list[Any] = []
        run.listen(told.append)
        with EnforcedBudget(6_500):
            pieces = run.evaluate(batch)
            in_pieces = run.evaluate(batch, lambda model, batch: {"scores": model(batch[0])})[
                "scores"
            ]
        torch.testing.assert_close(pieces, whole)
        torch.testing.assert_close(in_pieces, outputs)
        assert {event.phase for event in told if isinstance(event, OutOfMemoryEvent)} == {
            "evaluation"
        }
        assert run.model.training


def test_an_evaluation_that_is_done_over_draws_what_it_would_have_drawn() -> None:
    drawn: list[tuple[float, ...]] = []

    def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
        drawn.append((float(torch.randn(())), random.random(), float(np.random.rand())))
        if len(drawn) == 1:
            raise torch.OutOfMemoryError("made up")
        return model(batch[0])

    job = build_job(batch_norm=False)
    with memfit.start(job) as run:
        run.evaluate(job.batch(BATCH_SIZE), noisy)
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == len(drawn) - 1 == 2


@pytest.mark.slow
def test_a_loss_that_couples_samples_is_not_evaluated_in_pieces() -> None:
    def contrastive(model: nn.Module, batch: Any) -> torch.Tensor:
        outputs = model(batch[0])
        return nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))

    job = build_job(batch_norm=False, loss=contrastive)
    with (
        memfit.start(job) as run,
        OutOfMemoryAt(name="mm", most=1),
        pytest.raises(OutOfMemoryAfterAllError, match="couples"),
    ):
        run.evaluate(job.batch(BATCH_SIZE))


# --- Data that is moved, batches and parameters that are changed ---


def test_running_out_while_the_batch_is_moved_is_recovered_from(monkeypatch: Any) -> None:
    job, plan = build_job(), ladder_of()
    with memfit.start(job, plan) as run:
        failures = [torch.OutOfMemoryError("CUDA out of memory.")]

        def moved(batch: Any) -> Any:
            if failures:
                raise failures.pop()
            return batch

        monkeypatch.setattr(run._steps, "on_device", moved)
        run.step(job.batch(BATCH_SIZE))
        assert [event.phase for event in run.events] == ["data transfer"]


def doubling_job() -> memfit.Job:
    """Return a job whose loss changes its batch in place."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(model(inputs.mul_(2)), targets)

    return build_job(batch_norm=False, loss=loss)


@pytest.mark.slow
def test_a_batch_that_its_step_has_changed_is_put_back_on_the_cpu() -> None:
    job = doubling_job()
    _, wanted, operators = trained(job, ladder_of())
    for name in ("log_softmax_backward", "addcdiv"):
        place = [n for n, each in enumerate(operators, 1) if name in each][-1]
        run, found, _ = trained(job, ladder_of(), place)
        assert len(run.events) == 1
        run.close()
        same(found, wanted)


def test_beside_a_card_a_step_that_changes_its_batch_is_not_done_over(monkeypatch: Any) -> None:
    monkeypatch.setattr("memfit.runtime.guard.step_log.CPU", "a place that is no card")
    job = doubling_job()
    with memfit.start(job, ladder_of()) as run:
        with (
            OutOfMemoryAt(name="log_softmax_backward", most=1),
            pytest.raises(BatchChangedError, match="in place") as caught,
        ):
            run.step(job.batch(BATCH_SIZE))
        assert caught.value.exit_code == 4


def test_beside_a_card_nothing_is_gone_back_to_after_a_changed_batch(monkeypatch: Any) -> None:
    monkeypatch.setattr("memfit.runtime.guard.step_log.CPU", "a place that is no card")
    job = doubling_job()
    with memfit.start(job, ladder_of()) as run:
        run.step(job.batch(BATCH_SIZE))
        assert run._guard is not None
        run._guard._log._write_seconds = 1e9
        run.step(job.batch(BATCH_SIZE))
        with update_cut("batch was changed after its step"):
            run.step(job.batch(BATCH_SIZE))


@pytest.mark.slow
def test_parameters_that_others_change_without_notice_are_not_lost_in_silence() -> None:
    job = build_job(batch_norm=False)
    with memfit.start(job, ladder_of()) as run:
        for number, batch in enumerate(batches_of(job)[:3]):
            run._guard._log._write_seconds = 1e9 if number else 0.0
            if number == 1:
                for parameter in run.model.parameters():
                    parameter.data.mul_(0.5)
            if number < 2:
                run.step(batch)
        with update_cut("without autograd's notice"):
            run.step(batch)


@pytest.mark.slow
def test_parameters_that_others_change_between_steps_are_not_lost() -> None:
    """A cut update goes back to the file; what other code did since must be in it."""
    job, plan = build_job(batch_norm=False), ladder_of()
    ends = []
    for name in (None, "addcdiv"):
        with memfit.start(job, plan) as run:
            torch.manual_seed(2)
            for number, batch in enumerate(batches_of(job)):
                if number in {1, 2}:
                    with torch.no_grad():
                        for parameter in run.model.parameters():
                            parameter.mul_(0.5)
                with OutOfMemoryAt(name=name if number == 3 else None, most=1):
                    run.step(batch)
            assert len(run.events) == (name is not None)
            ends.append(everything(run))
    same(ends[1], ends[0])


def test_where_others_change_parameters_all_the_time_a_cut_update_is_said() -> None:
    job = build_job(batch_norm=False)
    with memfit.start(job, ladder_of()) as run:

        def clamped() -> None:
            with torch.no_grad():
                next(run.model.parameters()).clamp_(-1, 1)

        for _ in range(6):
            clamped()
            run.step(job.batch(BATCH_SIZE))
        clamped()
        with update_cut("changed between steps by other code"):
            run.step(job.batch(BATCH_SIZE))


def filled_anew(job: memfit.Job, fails: bool) -> dict[str, torch.Tensor]:
    """Train on one batch whose values are new in every step; the last update may fail."""
    with memfit.start(job, ladder_of()) as run:
        torch.manual_seed(7)
        batch = job.batch(BATCH_SIZE)
        for number in range(3):
            batch[0].copy_(torch.randn(BATCH_SIZE, 6))
            # The file is due at first, since it is small and steps are long; here it must be older.
            run._guard._log._write_seconds = 1e9 if number else 0.0
            with OutOfMemoryAt(name="addcdiv" if fails and number == 2 else None, most=1):
                run.step(batch)
        assert [event.num_steps_repeated for event in run.events] == [2] * fails
    return everything(run)


@pytest.mark.slow
def test_batches_that_are_filled_anew_are_repeated_as_they_were() -> None:
    job = build_job()
    same(filled_anew(job, fails=True), filled_anew(job, fails=False))


def test_beside_a_card_batches_are_not_copied_and_a_change_is_noticed(monkeypatch: Any) -> None:
    monkeypatch.setattr("memfit.runtime.guard.step_log.CPU", "a place that is no card")
    with pytest.raises(UpdateCutError, match="batch was changed after its step"):
        filled_anew(build_job(), fails=True)


@pytest.mark.slow
def test_what_the_log_keeps_takes_no_memory_of_the_budget() -> None:
    """Batches of earlier steps lie on the disk; a budget that one step fits fits many."""
    job = replace(build_job(batch_norm=False), batch_size=512)
    with memfit.start(job) as run:
        highest = []
        for number in range(12):
            batch = job.batch(512)
            run._guard._log._write_seconds = 1e9 if number else 0.0
            with EnforcedBudget(10**9) as budget:
                budget.watch([*run.model.parameters(), *batch])
                run.step(batch)
            del batch
            gc.collect()
            highest.append(budget.highest_bytes)
            assert len([each for each in gc.get_objects() if is_batch(each)]) == 0
        assert max(highest[2:]) == min(highest[2:])
        assert len(run._guard._log.entries) == 12


def is_batch(candidate: Any) -> bool:
    return type(candidate) is torch.Tensor and candidate.shape == (512, 6)


# --- A lost context ---

LOST = "CUDA error: an illegal memory access was encountered"


def test_a_lost_context_ends_the_run_with_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    job = build_job()
    batches = batches_of(job)
    straight = memfit.start(job, ladder_of())
    torch.manual_seed(4)
    for batch in batches[:2]:
        straight.step(batch)
    lost = {"is": False}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if lost["is"]:
            raise RuntimeError(LOST)
        return job.loss(model, batch)

    run = memfit.start(replace(job, loss=loss), ladder_of(), guard=GuardSettings(folder=tmp_path))
    torch.manual_seed(4)
    run.step(batches[0])
    run._guard._log.forget("so that the file is of now")
    run.step(batches[1])
    run._guard._log.write(2, run._guard._log.begin())
    lost["is"] = True
    with pytest.raises(LostContextError, match="What step 2 left is saved") as caught:
        run.step(batches[2])
    assert caught.value.exit_code == 5
    (path,) = tmp_path.glob("emergency-*.pt")
    resumed = memfit.start(job, ladder_of())
    resumed.load_state_dict(torch.load(path, weights_only=True))
    assert resumed.num_steps == 2
    same(resumed.model.state_dict(), straight.model.state_dict())
    for number, state in straight.optimizer.state_dict()["state"].items():
        same(resumed.optimizer.state_dict()["state"][number], state)


@pytest.mark.slow
def test_a_script_that_loses_its_context_ends_with_a_code_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import torch, memfit

def loss(model, batch):
    raise RuntimeError({LOST!r})

job = memfit.Job(
    model=lambda: torch.nn.Linear(2, 1),
    batch=lambda size: torch.randn(size, 2),
    loss=loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch_size=4,
)
memfit.start(job).step(job.batch(4))
"""
    )
    done = run_python(str(script), cwd=tmp_path)
    assert done.returncode == 5, done.stderr
    assert "lost the context of its card" in done.stderr
    assert list(tmp_path.glob("emergency-*.pt"))
