"""Ordinary training loops with state of their own end as if no step had run out of memory."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from guard_scenarios import injection, loops  # noqa: F401 - loading the loops lists them
from guard_scenarios.training import SCENARIOS
from tests.runtime.guard_faults import (
    OutOfMemoryAt,
    batches_of,
    build_job,
    everything,
    ladder_of,
    same,
)
from torch import nn

import memfit
from memfit.errors import MemfitWarning, NotPutBackError
from memfit.runtime.guard.batch_file import BatchFile
from memfit.runtime.guard.silent_writes import may_write_silently
from memfit.runtime.guard.state_marks import PassedState, marks_of
from memfit.strategies.fp16 import Fp16

pytestmark = pytest.mark.usefixtures("small_heap", "unhurried_log")
SOME = (
    "gradients of another loss added before run.step",
    "weights perturbed in the loss and put back",
    "Lookahead around Adam, slow weights in a list",
    "SAM with a second closure",
    "one element of a large batch changed through .data in the loss",
    "torch.Generator shared by the loss and the loader",
    "buffer that is resized in place",
    "MoCo: queue, pointer and key encoder",
    "optimizer in backward, with a counter in the loss and SGD",
    "iterator over a list, advanced in forward",
    "one weight of a large layer set through .data once",
)
FINE = ("equal", "said", "ended-true-reason")


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_a_loop_ends_as_if_nothing_had_been_or_with_the_true_reason(name: str) -> None:
    scenario = SCENARIOS[name]
    undisturbed = injection.carried_out(scenario, injection.Fault())
    for fault in injection.drawn_faults(undisturbed.places, 3, name):
        verdict = injection.judged(scenario, fault, undisturbed)
        assert verdict.outcome in FINE, verdict


def test_what_cannot_be_put_back_is_said_at_the_start_and_ends_a_failed_step() -> None:
    rates = iter([1.0] * 9)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) * next(rates)

    job = build_job(batch_norm=False, loss=loss)
    with pytest.warns(MemfitWarning, match="rates"):
        run = memfit.start(job, ladder_of())
    assert any("rates" in str(each) for each in run.not_put_back)
    run.step(batches_of(job)[0])
    with (
        OutOfMemoryAt(name="addcdiv", most=1),
        pytest.raises(NotPutBackError, match=r"Step 2.*rates") as caught,
    ):
        run.step(batches_of(job)[1])
    assert caught.value.exit_code == 4
    run.close()


def test_one_slow_write_of_a_batch_does_not_end_the_log(monkeypatch: Any) -> None:
    store, slow = BatchFile.store, [0.2]

    def hesitating(self: BatchFile, batch: Any) -> Any:
        time.sleep(slow.pop() if slow else 0)
        return store(self, batch)

    monkeypatch.setattr("memfit.runtime.guard.step_log._FREE_SECONDS", 0.05)
    monkeypatch.setattr(BatchFile, "store", hesitating)
    job = build_job()
    with memfit.start(job, ladder_of()) as run:
        for batch in batches_of(job)[:3]:
            run.step(batch)
        assert run._guard is not None
        assert run._guard._log.obstacle is None
        assert not slow


@pytest.mark.slow
def test_the_scale_of_gradients_goes_on_under_a_smaller_plan() -> None:
    job = build_job(batch_norm=False)
    ends = []
    for name in (None, "log_softmax_backward"):
        with memfit.start(job, ladder_of(Fp16())) as run:
            torch.manual_seed(2)
            for number, batch in enumerate(batches_of(job)):
                with OutOfMemoryAt(name=name if number == 3 else None, most=1):
                    run.step(batch)
            (scaler,) = run._steps.session.stateful.values()
            scale = {name: torch.tensor(value) for name, value in scaler.state_dict().items()}
            ends.append({**everything(run), **scale})
    same(ends[1], ends[0])


def halved(tensor: torch.Tensor) -> None:
    for start in range(0, len(tensor), 10):
        tensor[start : start + 10] *= 0.5


def test_a_state_on_the_way_is_passed_and_another_one_is_not() -> None:
    tensor = torch.arange(1.0, 101.0)
    wanted = tensor.clone()
    wanted[:30] *= 0.5
    for value, is_passed in ((8.0, True), (8.5, False)):
        wanted[15] = value
        now = tensor.clone()
        with PassedState(marks_of({"a": wanted}), lambda now=now: {"a": now}) as passed:
            halved(now)
        assert passed.was_passed == is_passed


def test_an_operator_may_be_cut_between_two_of_its_tensors() -> None:
    before = [torch.ones(3), torch.ones(3)]
    marks = marks_of({"0": before[0] * 2, "1": before[1]})
    with PassedState(marks, lambda: dict(zip("01", before, strict=True))) as passed:
        torch._foreach_mul_(before, 2)
    assert passed.was_passed


class Writing(nn.Linear):
    """Writes past autograd's counter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def clamp() -> None:
            self.weight.data.clamp_(-1, 1)

        clamp()
        return super().forward(x)


def read(model: nn.Module) -> Any:
    return np.asarray([1.0])


def test_code_that_may_write_past_autograd_is_recognised() -> None:
    assert may_write_silently(nn.Sequential(Writing(2, 2)), [])
    assert may_write_silently(nn.Linear(2, 2), [read.__code__])
    assert not may_write_silently(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), [])
