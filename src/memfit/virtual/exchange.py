"""Exchanges two tensors under their identities, with hooks, so that whoever holds one goes on."""

from __future__ import annotations

import copyreg
import gc
from typing import Any

import torch

from memfit.errors import RecordingError

_ABSENT = object()


def take_along_hooks(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Register a tensor's hooks with another one; those of a frozen one come along as well.

    The other tensor requires gradients afterwards, where it can: torch takes hooks of no other.
    Tensors in the middle of an autograd graph keep their hooks to themselves.
    """
    if not tensor.is_leaf or not (other.is_floating_point() or other.is_complex()):
        return
    other.requires_grad_(True)
    for hook in (tensor._backward_hooks or {}).values():
        other.register_hook(hook)
    after: Any = getattr(tensor, "_post_accumulate_grad_hooks", None)
    for hook in (after or {}).values():
        other.register_post_accumulate_grad_hook(hook)


def exchange(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange everything but the identity of two tensors, or leave both as they were.

    Raises:
        RuntimeError: if something in torch refers weakly to one of them, as autocast's cache does.
        TypeError: if their classes cannot be exchanged.
    Source: the exchange is the one of ``torch.utils.swap_tensors``.
    """
    _exchange_classes(first, second)
    try:
        torch._C._swap_tensor_impl(first, second)
    except RuntimeError:
        _exchange_classes(first, second)
        raise
    first.__dict__, second.__dict__ = second.__dict__, first.__dict__
    _exchange_slots(first, second)


def _exchange_slots(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange what lies in ``__slots__``, where a DTensor has its local tensor and its layout."""
    for name in _slots_of(type(first)):
        values = [getattr(each, name, _ABSENT) for each in (first, second)]
        for tensor, value in zip((second, first), values, strict=True):
            if value is not _ABSENT:
                setattr(tensor, name, value)
            elif hasattr(tensor, name):
                delattr(tensor, name)


def _slots_of(kind: type) -> list[str]:
    """Return the names in ``__slots__`` of a class and its bases, as ``copyreg`` finds them."""
    names: list[str] = copyreg._slotnames(kind)  # type: ignore[attr-defined]
    return names


def refuse_if_an_optimizer_holds(name: str, parameter: torch.Tensor, reason: str) -> None:
    """Refuse to go on with a copy of a parameter that an optimizer holds, and would go on with.

    It looks through all objects of Python, so it is for the rare case that has found a reason to.

    Args:
        name: of the parameter, for the message.
        parameter: what could not be exchanged.
        reason: what torch said about that.

    Raises:
        RecordingError: with the names of the optimizer and the parameter.
    """
    for each in gc.get_objects():
        if not issubclass(type(each), torch.optim.Optimizer):
            continue
        # One whose class raised before it had groups may live on, in a traceback for example.
        groups = getattr(each, "param_groups", ())
        if any(held is parameter for group in groups for held in group["params"]):
            raise RecordingError(
                f"{type(each).__name__} holds {name} of shape {tuple(parameter.shape)}, which "
                f"cannot move or change its dtype under its identity ({reason}), so the optimizer "
                "would train what was left behind",
                "Make the optimizer after the model has moved, or let go of what refers to the "
                "parameter, such as autocast around both or torch.utils.weak.",
            )


def _exchange_classes(first: torch.Tensor, second: torch.Tensor) -> None:
    of_first, of_second = type(first), type(second)
    if of_first is not of_second:
        first.__class__ = of_second
        second.__class__ = of_first
