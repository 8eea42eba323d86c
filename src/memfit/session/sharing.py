"""What ties parameters together: weights used in several places, optimizers that look at all."""

from __future__ import annotations

import inspect

import torch

# Each estimates one step size, or takes one norm, over all parameters.
# Source: Mishchenko & Defazio 2023 (Prodigy), https://arxiv.org/abs/2306.06101; Defazio &
# Mishchenko 2023 (D-Adaptation), https://arxiv.org/abs/2301.07733; Foret et al. 2021 (SAM),
# https://arxiv.org/abs/2010.01412.
_GLOBAL = ("DAdaptAdaGrad", "DAdaptAdam", "DAdaptLion", "DAdaptSGD", "Prodigy", "SAM")
_CLIPPING = ("clip_grad_norm", "gradient_clipping", "max_grad_norm")


def tied_weights(model: torch.nn.Module) -> tuple[tuple[str, ...], ...]:
    """Give the names of each parameter that several modules, or places in one, share."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(shared) for shared in names.values() if len(shared) > 1)


def global_update(optimizer: torch.optim.Optimizer) -> str:
    """Say in a clause why an optimizer needs all gradients at once; empty if it does not."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return "its step computes the loss again, by a closure"
    if type(optimizer).__name__ in _GLOBAL:
        return "it takes one figure over all parameters"
    clipping = [name for name in _CLIPPING if optimizer.defaults.get(name)]
    return f"it clips the norm of all gradients itself ({clipping[0]})" if clipping else ""
