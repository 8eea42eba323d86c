"""Learning-rate schedules by the document's names."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import lr_scheduler

_WARM_SHARE = 0.3
_NUM_DECAYS = 3


def build_schedule(name: str, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
    """Build a schedule that is told of every step.

    ``one_cycle`` rises for 30 % of the steps and falls as a cosine; ``step`` divides by ten three
    times; ``reduce_on_plateau`` halves after ten validations without a better one.
    """
    if name == "one_cycle":
        peak = optimizer.param_groups[0]["lr"]
        return lr_scheduler.OneCycleLR(
            optimizer, max_lr=peak, total_steps=num_steps + 1, pct_start=_WARM_SHARE
        )
    if name == "cosine_annealing":
        return lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_steps)
    if name == "step":
        each = max(1, num_steps // (_NUM_DECAYS + 1))
        return lr_scheduler.StepLR(optimizer, step_size=each, gamma=0.1)
    if name == "reduce_on_plateau":
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5)
    return lr_scheduler.ConstantLR(optimizer, factor=1.0)


def follows_validation(schedule: Any) -> bool:
    """Return whether a schedule goes by validations, not by steps."""
    return isinstance(schedule, lr_scheduler.ReduceLROnPlateau)
