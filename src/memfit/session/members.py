"""Other tensors in the places of a module's parameters and buffers, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def members_replaced(
    block: nn.Module, replace: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Put other tensors in the places of a block's parameters and buffers."""
    kept: list[tuple[Any, dict[str, Any]]] = []
    try:
        for module in block.modules():
            for members in (module._parameters, module._buffers):
                kept.append((members, dict(members)))
                for name, tensor in members.items():
                    if tensor is not None:
                        # A parameter's place takes any tensor here.
                        members[name] = replace(tensor)  # type: ignore[assignment]
        yield
    finally:
        for members, before in kept:
            members.update(before)
