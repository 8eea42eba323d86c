"""Follows memory that is larger than the tensor in it, or that is resized past all operators.

Some operators compute an element for every element of their input, add these up, and shrink their
result to the sum; the memory stays. Fake tensors only know the result's shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

_ATEN = torch.ops.aten
_NO_REDUCTION = 0


def hold_whole_storage(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
) -> None:
    """Let an operator's result hold the memory that it holds in earnest.

    Source: the storages of results of torch 2.13.0+cpu, 2026-11-21; the shapes are those that
    ``mse_loss`` in aten/src/ATen/native/Loss.cpp and its kin resize.
    """
    num_elements = _ELEMENTS.get(func)
    if num_elements is None or not isinstance(out, torch.Tensor):
        return
    num_bytes = num_elements(args, kwargs) * out.element_size()
    storage = out.untyped_storage()
    if num_bytes > storage.nbytes():
        storage.resize_(num_bytes)


@contextmanager
def resizes_seen(tell: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Tell of every storage that Python code resizes inside, once it has its new size.

    FSDP frees the parameters that it has gathered with ``storage.resize_(0)`` and takes their
    memory again with ``storage.resize_(num_bytes)`` (torch/distributed/fsdp/_fully_shard, 2.13).
    """
    resize: Any = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        result = resize(storage, num_bytes)
        tell(storage)
        return result

    with patch.object(torch.UntypedStorage, "resize_", resize_and_tell):
        yield


def _of_input(args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> int:
    return int(args[0].numel())


def _of_loss(place: int) -> Callable[[tuple[Any, ...], Mapping[str, Any]], int]:
    """Return the rule of a loss whose reduction is the argument at a place."""

    def num_elements(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        default = args[place] if len(args) > place else 1
        if kwargs.get("reduction", default) == _NO_REDUCTION:
            return 0
        return math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape))

    return num_elements


_ELEMENTS: Mapping[Any, Callable[[tuple[Any, ...], Mapping[str, Any]], int]] = {
    _ATEN.binary_cross_entropy.default: _of_loss(3),
    _ATEN.col2im.default: _of_input,
    _ATEN.mse_loss.default: _of_loss(2),
    _ATEN.smooth_l1_loss.default: _of_loss(2),
    _ATEN.soft_margin_loss.default: _of_loss(2),
}
