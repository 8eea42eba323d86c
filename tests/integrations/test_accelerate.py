"""A loop of Accelerate under a plan has the weights of the plain one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("accelerate")
from accelerate import Accelerator

from memfit.errors import MemfitError
from memfit.integrations.accelerate import fit
from memfit.strategies import MicroBatching
from memfit.strategies.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore")


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def prepared(**options: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **options)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 8, dtype=torch.float64, generator=generator),
            torch.randint(3, (size,), generator=generator),
        )
        for size in (12, 12, 7)
    ]


@pytest.mark.slow
def test_a_step_is_that_of_the_loop() -> None:
    accelerator, plain, optimizer, scheduler = prepared()
    for batch in batches():
        accelerator.backward(loss(plain, batch))
        accelerator.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    accelerator, model, optimizer, scheduler = prepared()
    plan = Plan(strategies=(MicroBatching(micro_batch_size=5),))
    first = batches()[0]
    run = fit(accelerator, model, optimizer, loss, first, plan=plan, clip_grad_norm=0.1)
    for batch in batches():
        run.step(batch)
        scheduler.step()
    run.close()

    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert max((a - b).abs().max().item() for a, b in pairs) < 1e-12
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 / 8)


@pytest.mark.slow
def test_a_plan_is_made_for_a_budget() -> None:
    accelerator, model, optimizer, _ = prepared()
    run = fit(accelerator, model, optimizer, loss, batches()[0], budget="1GiB")

    assert run.plan.prediction is not None
    assert run.step(batches()[0]).loss.item() > 0


def test_loops_that_accumulate_themselves_are_refused() -> None:
    accelerator, model, optimizer, _ = prepared(gradient_accumulation_steps=2)

    with pytest.raises(MemfitError, match="Set 1, and give the whole effective batch"):
        fit(accelerator, model, optimizer, loss, batches()[0])
