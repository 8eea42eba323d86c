"""Bytes of tensors and of the copies that kernels make of them."""

from __future__ import annotations

import torch

_INT_MAX = 2**31 - 1


def num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor that is packed densely."""
    return tensor.numel() * tensor.element_size()


def copied_bytes(
    *tensors: torch.Tensor | None,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> tuple[int, ...]:
    """Return the copies that ``contiguous()`` makes: one for each tensor not laid out so."""
    return tuple(
        num_bytes(tensor)
        for tensor in tensors
        if tensor is not None and not tensor.is_contiguous(memory_format=memory_format)
    )


def accumulate_width(dtype: torch.dtype) -> int:
    """Return the bytes of the type that CUDA kernels add up in: fp32 for 16-bit floats."""
    return max(4, dtype.itemsize) if dtype.is_floating_point else 8


def fits_32_bit(tensor: torch.Tensor) -> bool:
    """Return whether torch's iterator reaches every byte of a tensor with a 32-bit offset."""
    spans = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in spans)
    return (1 + last) * tensor.element_size() <= _INT_MAX and tensor.numel() <= _INT_MAX
