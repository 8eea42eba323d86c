"""Has transformers models keep no keys and values for generation while they are trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


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
