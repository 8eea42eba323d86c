"""What strategies do to forwards: others in their place, no caches, and whether they run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_CHECKPOINTING = "torch.utils.checkpoint"


def replace_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Have one module, not its class, call another function; return what undoes it."""
    before = vars(module).get("forward")
    module.forward = forward

    def undo() -> None:
        if before is None:
            del module.forward  # the instance attribute; the class's own forward shows again
        else:
            module.forward = before

    return undo


@contextmanager
def forwards_kept(model: torch.nn.Module) -> Iterator[None]:
    """Leave the forwards of all modules as they are, whatever the attributes are set to inside.

    Args:
        model: whose state is put back to what it was under another plan.
    """
    kept = [(vars(module), vars(module).get("forward")) for module in model.modules()]
    try:
        yield
    finally:
        for attributes, forward in kept:
            if forward is None:
                attributes.pop("forward", None)
            else:
                attributes["forward"] = forward


@contextmanager
def without_generation_caches(model: torch.nn.Module) -> Iterator[None]:
    """Switch ``use_cache`` off in all configurations of a model, and on again afterwards.

    Training has no use for such a cache. A forward that runs again would append to it a second
    time, and the caches of pieces cannot be joined. transformers does the same under its own
    checkpointing.

    Args:
        model: any; without such configurations nothing happens.
    """
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    found = {id(config): config for config in configs if getattr(config, "use_cache", False)}
    for config in found.values():
        config.use_cache = False
    try:
        yield
    finally:
        for config in found.values():
            config.use_cache = True


def is_recomputed_later() -> bool:
    """Return whether all this lies inside a checkpointed region, which saves nothing here."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return bool(hooks) and getattr(hooks[0], "__module__", "") == _CHECKPOINTING
