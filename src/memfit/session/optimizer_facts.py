"""What strategies need to know of an optimizer, read off the live object."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

TORCH = "torch.optim"
_NO_SETTINGS = ("params", "param_names")
"""What a parameter group has besides settings."""
SCHEDULER = "scheduler"
HOOK_BEFORE_STEP = "hook before its step"
HOOK_AFTER_STEP = "hook after its step"
OWN_STEP = "step function of its own"


def package_of(optimizer: torch.optim.Optimizer) -> str:
    """Name the package that an optimizer comes from: ``torch.optim`` for torch's own."""
    module = type(optimizer).__module__
    return TORCH if f"{module}.".startswith(f"{TORCH}.") else module.partition(".")[0]


def options_in_use(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Name the settings that are neither zero, False nor None in some parameter group.

    A setting that is a tensor is named a second time, as ``lr as a tensor``.
    """
    names: set[str] = set()
    for group in optimizer.param_groups:
        for name, value in group.items():
            if isinstance(value, torch.Tensor):
                names |= {name, f"{name} as a tensor"}
            elif name not in _NO_SETTINGS and value:
                names.add(name)
    return tuple(sorted(names))


def attachments_of(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Name what has been attached to an optimizer's step: hooks, a scheduler, another function."""
    return tuple(_attachments(optimizer))


def parameter_dtypes_of(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Name the types of the parameters that are trained."""
    dtypes = {
        str(parameter.dtype).removeprefix("torch.")
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    }
    return tuple(sorted(dtypes))


def _attachments(optimizer: Any) -> Iterator[str]:
    if optimizer._optimizer_step_pre_hooks:
        yield HOOK_BEFORE_STEP
    if optimizer._optimizer_step_post_hooks:
        yield HOOK_AFTER_STEP
    own = vars(optimizer).get("step")
    if own is not None:
        # Schedulers put a function in the place of ``step`` that only notes the call.
        yield SCHEDULER if hasattr(own, "_wrapped_by_lr_sched") else OWN_STEP
