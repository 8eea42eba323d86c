"""Finds weights that are to be trained and are not there, as after a device map for inference."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from memfit.errors import JobFunctionError, WeightsNotHereError


def check_weights_are_here(model: torch.nn.Module) -> None:
    """Refuse trainable weights that are brought in for forward alone: they would never change.

    Accelerate's hooks keep the weights of modules that a device map puts on ``cpu`` or ``disk``
    elsewhere, and put them on the meta device in between. Gradients go to copies that are thrown
    away. Frozen weights may be kept so. Fake tensors are left alone: nothing is trained.

    Raises:
        WeightsNotHereError: if there are such weights.
        JobFunctionError: if some have no size yet, so that no optimizer can take them.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise JobFunctionError(
                "model",
                "",
                f"{name} is of a lazy module that has not run, so it has no size",
                "Have the model function run a forward under torch.no_grad() before it returns the "
                "model.",
            )
    absent = list(dict.fromkeys(_absent(model)))
    if absent:
        is_dispatched = any(_is_offloaded(module) for module in model.modules())
        raise WeightsNotHereError(absent, is_dispatched=is_dispatched)


def _absent(model: torch.nn.Module) -> Iterator[str]:
    for prefix, module in model.named_modules():
        is_offloaded = _is_offloaded(module)
        for name, parameter in module.named_parameters(recurse=False):
            is_here = not (parameter.is_meta or is_offloaded) or isinstance(parameter, FakeTensor)
            if parameter.requires_grad and not is_here:
                yield f"{prefix}.{name}" if prefix else name


def _is_offloaded(module: torch.nn.Module) -> bool:
    """Return whether a hook of accelerate brings in the module's weights; several come in a row."""
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))
    return any(getattr(each, "offload", False) is True for each in hooks)
