"""Training that fails where it is told to, and everything that it ends with."""

from __future__ import annotations

import contextlib
import copy
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memfit
from memfit import GuardSettings, Job, Plan
from memfit.errors import UpdateCutError
from memfit.runtime.run import Run

NUM_STEPS, BATCH_SIZE = 5, 8


class OutOfMemoryAt(TorchDispatchMode):
    """Raise at operators of given numbers, counted over everything that is run inside, or of a name."""

    def __init__(self, *numbers: int, name: str | None = None, most: int | None = None) -> None:
        super().__init__()
        self.numbers = set(numbers)
        self.name = name
        self.most = most
        self.seen: list[str] = []
        self.num_raised = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Threads that exchange between ranks work for all of them.
        if threading.current_thread() is not threading.main_thread():
            return func(*args, **(kwargs or {}))
        self.seen.append(str(func))
        is_named = self.name is not None and self.name in str(func) and self.most != 0
        if len(self.seen) in self.numbers or is_named:
            self.most = None if self.most is None else self.most - 1
            self.num_raised += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory, made up at {func}")
        return func(*args, **(kwargs or {}))


def network(*, batch_norm: bool) -> nn.Module:
    norm = nn.BatchNorm1d(12) if batch_norm else nn.LayerNorm(12)
    return nn.Sequential(
        nn.Linear(6, 12), norm, nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 12), nn.Linear(12, 3)
    )


def build_job(*, batch_norm: bool = True, optimizer: Any = None, loss: Any = None) -> Job:
    torch.manual_seed(3)
    template = network(batch_norm=batch_norm)

    def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return F.cross_entropy(model(inputs), targets)

    return Job(
        model=lambda: copy.deepcopy(template),
        batch=lambda size: (torch.randn(size, 6), torch.randint(0, 3, (size,))),
        loss=loss or cross_entropy,
        optimizer=optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=0.05)),
        batch_size=BATCH_SIZE,
    )


def without_dropout() -> Job:
    """Return a job whose results do not depend on how its batches are cut, but for rounding."""
    job = build_job(batch_norm=False)
    model = job.model()
    model[3].p = 0.0
    return replace(job, model=lambda: copy.deepcopy(model))


def batches_of(job: Job, num_steps: int = NUM_STEPS, seed: int = 9) -> list[Any]:
    torch.manual_seed(seed)
    return [job.batch(BATCH_SIZE) for _ in range(num_steps)]


def everything(run: Run) -> dict[str, torch.Tensor]:
    """Return all that a run's next step depends on."""
    end = {
        "random": torch.get_rng_state(),
        "python random": torch.tensor(random.getstate()[1]),
        "num_steps": torch.tensor(run.num_steps),
        "learning rate": torch.tensor(run.optimizer.param_groups[0]["lr"]),
        **{f"model.{name}": tensor for name, tensor in run.model.state_dict().items()},
    }
    for number, state in run.optimizer.state_dict()["state"].items():
        end |= {f"optimizer.{number}.{name}": torch.as_tensor(v) for name, v in state.items()}
    return copy.deepcopy(end)


def trained(
    job: Job,
    plan: Plan,
    *faults: int,
    settings: GuardSettings | bool = True,
    seed: int = 9,
    average_gradients: bool = False,
) -> tuple[Run, dict[str, torch.Tensor], list[str]]:
    """Train with faults and a scheduler; return the run, what it ends with, and the operators."""
    run = memfit.start(job, plan, guard=settings, average_gradients=average_gradients)
    schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 2, 0.5)
    torch.manual_seed(1)
    random.seed(1)
    losses = []
    mode = OutOfMemoryAt(*faults)
    for batch in batches_of(job, seed=seed):
        with mode:
            result = run.step(batch)
        losses.append(result.loss.clone())
        schedule.step()
    return run, {"losses": torch.stack(losses), **everything(run)}, mode.seen


def same(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], *, tolerance: float = 0.0
) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        if tolerance and wanted[name].is_floating_point():
            torch.testing.assert_close(found[name], wanted[name], rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(found[name], wanted[name]), name


@contextlib.contextmanager
def update_cut(match: str) -> Iterator[pytest.ExceptionInfo[UpdateCutError]]:
    """Run out of memory in the update of a step, which is said with these words."""
    fault = OutOfMemoryAt(name="addcdiv", most=1)
    with pytest.raises(UpdateCutError, match=match) as caught, fault:
        yield caught


def ladder_of(*strategies: Any, rungs: int = 8) -> Plan:
    """Return a plan whose smaller plans are the same, so that results are equal to the bit."""
    plan = Plan(strategies=strategies)
    return Plan(strategies=strategies, ladder=(plan,) * rungs)
