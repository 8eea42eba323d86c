"""A linear layer of 4-bit weights as bitsandbytes 0.41 runs it, in the bytes that it takes.

``MatMul4Bit`` of that version keeps its input for backward wherever the input needs a gradient
(``ctx.tensors = (A, B)``, bitsandbytes/autograd/_functions.py); later ones do not. Weights were
quantized from float16, so that they are unpacked to float16 and then cast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_BLOCK = 64
_NESTED_BLOCK = 256
_TABLE_VALUES = 16
_NESTED_TABLE_VALUES = 256


class PackedLinear(nn.Module):
    """Hold a weight in 4 bits, with a scale of each 64 values; nested ones are packed again."""

    def __init__(
        self,
        n_in: int,
        n_out: int,
        bias: bool,
        *,
        is_nested: bool,
        keeps_input: bool,
    ) -> None:
        super().__init__()
        num_values, num_scales = n_in * n_out, -(-n_in * n_out // _BLOCK)
        self.shape = (n_out, n_in)
        self.keeps_input = keeps_input
        self.weight = nn.Parameter(
            torch.zeros(num_values // 2, 1, dtype=torch.uint8), requires_grad=False
        )
        self.scales = torch.zeros(num_scales, dtype=torch.uint8 if is_nested else torch.float32)
        self.table = torch.zeros(_TABLE_VALUES)
        if is_nested:
            self.nested_scales = torch.zeros(-(-num_scales // _NESTED_BLOCK))
            self.nested_table = torch.zeros(_NESTED_TABLE_VALUES)
            self.nested_offset = torch.zeros(())
        self.bias = nn.Parameter(torch.zeros(n_out), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply with the unpacked weight."""
        return _Product.apply(x, self)


def _unpacked(layer: PackedLinear, dtype: torch.dtype) -> torch.Tensor:
    scales = layer.scales
    if scales.dtype is torch.uint8:
        scales = torch.empty(scales.shape, dtype=torch.float32, device=scales.device)
        scales += layer.nested_offset
    weight = torch.empty(layer.shape, dtype=torch.float16, device=layer.weight.device)
    return weight.to(dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        out = nn.functional.linear(x, _unpacked(layer, x.dtype), bias)
        ctx.kept = x if layer.keeps_input and ctx.needs_input_grad[0] else None
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None
        return torch.matmul(grad, _unpacked(ctx.layer, grad.dtype)), None
