"""Steps an optimizer for one parameter at a time."""

from __future__ import annotations

from typing import Any

import torch

from memfit.session.optimizer_facts import HOOK_BEFORE_STEP, OWN_STEP, TORCH, package_of
from memfit.strategies.facts import JobFacts

PACKAGES = (TORCH, "bitsandbytes")
"""The packages whose optimizers are known to step one parameter as they step all."""


def attachment_obstacle(facts: JobFacts) -> str | None:
    """Return what is attached to the optimizer's step and would be passed over; None if nothing."""
    for name in facts.optimizer_attachments:
        if name in {HOOK_BEFORE_STEP, OWN_STEP}:
            return f"the optimizer has a {name}, which would find no gradients any more."
    return None


def step_alone(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> None:
    """Step an optimizer for the one parameter that has a gradient.

    The step is the class's own, without the hooks and counters around it.
    """
    step: Any = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step
    if package_of(optimizer) != TORCH:
        # Other packages may know a parameter by its place, so all of them keep theirs.
        step(optimizer)
        return
    # Looking through all parameters for each of them would take time quadratic in their number.
    groups, members = optimizer.param_groups, group["params"]
    optimizer.param_groups, group["params"] = [group], [parameter]
    try:
        step(optimizer)
    finally:
        optimizer.param_groups, group["params"] = groups, members
