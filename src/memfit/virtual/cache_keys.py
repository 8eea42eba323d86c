"""Keys of torch's cache of fake results, made faster: recording spends much of its time on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout)
_KINDS = frozenset((*_PLAIN, torch.memory_format))
_TENSOR = object()
"""Stands before what describes a tensor, so that no list of plain arguments looks like one."""


def append_key(
    key: list[object],
    arguments: Iterable[object],
    mode: FakeTensorMode,
    append_other: Callable[[object], None],
) -> None:
    """Append what a fake result depends on: the same as torch's own key says, in fewer calls.

    Args:
        key: what is extended.
        arguments: an operator's arguments.
        mode: whose fake tensors may have cached results.
        append_other: asked to append any argument of another kind, as torch would.
    """
    for argument in arguments:
        kind = type(argument)
        if kind in _KINDS:
            key += (kind, argument)
        elif kind is list or kind is tuple or kind is torch.Size:
            assert isinstance(argument, list | tuple), "just seen"
            key += (kind, len(argument))
            append_key(key, argument, mode, append_other)
        elif isinstance(argument, FakeTensor) and _is_usual(argument, mode):
            key += (
                _TENSOR,
                argument.dtype,
                argument.shape,
                argument.stride(),
                argument.device,
                argument.storage_offset(),
                argument.untyped_storage().nbytes(),
                argument.requires_grad,
                argument.is_conj(),
                argument.is_neg(),
                argument.is_inference(),
            )
        else:
            append_other(argument)


def _is_usual(tensor: FakeTensor, mode: FakeTensorMode) -> bool:
    """Return whether a mode's tensor has known sizes, no known values, and no special layout."""
    return (
        tensor.fake_mode is mode
        and tensor.constant is None
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor._has_symbolic_sizes_strides
    )
