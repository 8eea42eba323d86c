"""Does again what the guard itself needs, where memory was short."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from memfit.observe.out_of_memory import is_out_of_memory

_R = TypeVar("_R")
_MOST_TRIES = 5


def retried(action: Callable[[], _R], device_type: str) -> _R:
    """Run what may be done over, again if memory is short."""
    for _ in range(_MOST_TRIES - 1):
        try:
            return action()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        free_memory(device_type)
    return action()


def free_memory(device_type: str) -> None:
    """Release what a failed attempt left behind."""
    gc.collect()
    if device_type == "cuda":
        torch.cuda.empty_cache()
