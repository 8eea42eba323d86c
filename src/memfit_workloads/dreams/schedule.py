"""The learning rate: constant, or Noam's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How the learning rate changes with the steps."""

    lr: float
    """The highest."""
    warmup_steps: int = 0
    """0 keeps the learning rate constant."""
    weight_decay: float = 0.0


def noam_factor(step: int, warmup_steps: int) -> float:
    """Return the share of the highest learning rate at a step, counted from 0.

    It rises linearly until ``warmup_steps`` and falls with the inverse root of the step.
    Source: Vaswani et al. 2017, arXiv 1706.03762, equation 3, scaled to 1 at its highest.
    """
    if warmup_steps == 0:
        return 1.0
    done = step + 1
    return min(done / warmup_steps, (warmup_steps / done) ** 0.5)


def noam(parameters: Iterable[torch.nn.Parameter], schedule: Schedule) -> Any:
    """Return what Lightning's ``configure_optimizers`` gives: Adam, and how its rate runs."""
    optimizer = torch.optim.Adam(parameters, lr=schedule.lr, weight_decay=schedule.weight_decay)
    factors = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: noam_factor(step, schedule.warmup_steps)
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": factors, "interval": "step"}}
