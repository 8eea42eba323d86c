"""Tells a recorder what a tensor is for, from code that knows and does not know of recorders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memfit.trace.events import Category

_Listener = Callable[[torch.Tensor, Category], None]
_BatchListener = Callable[[torch.Tensor, str], None]
_LISTENERS: list[_Listener] = []
_BATCH_LISTENERS: list[_BatchListener] = []


@contextmanager
def purposes_heard(listener: _Listener, batch_listener: _BatchListener) -> Iterator[None]:
    """Have purposes told to a listener inside, and to another one what belongs to batches."""
    _LISTENERS.append(listener)
    _BATCH_LISTENERS.append(batch_listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)
        _BATCH_LISTENERS.remove(batch_listener)


def tell_purpose(tensor: torch.Tensor, category: Category) -> None:
    """Say what a tensor's memory is for, to whoever records."""
    for listener in _LISTENERS:
        listener(tensor, category)


def tell_batch(batch: Any, source_line: str = "") -> Any:
    """Say that tensors are a step's batch, and which line made it; gives the batch."""
    if _BATCH_LISTENERS:
        for leaf in tree_leaves(batch):
            if isinstance(leaf, torch.Tensor):
                for listener in _BATCH_LISTENERS:
                    listener(leaf, source_line)
    return batch


def purposes_of(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[torch.Tensor, Category]]:
    """Yield what an operator of FSDP2 tells of the purposes of its tensors.

    Parameters are gathered in one buffer and copied out of it; gradients are copied into another
    and reduced (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, torch 2.13).
    """
    if getattr(func, "namespace", "") != "fsdp":
        return
    name = str(func).removeprefix("fsdp.").partition(".")[0]
    if name == "all_gather_copy_in":
        yield args[1], Category.COMMUNICATION
    elif name == "chunk_cat":
        yield kwargs["out"] if "out" in kwargs else args[3], Category.COMMUNICATION
    elif name == "split_with_sizes_copy":
        for tensor in kwargs["out"]:
            yield tensor, Category.GATHERED_PARAMETERS
