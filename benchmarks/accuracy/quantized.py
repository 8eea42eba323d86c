"""Linear layers with 4-bit weights, made of the tensors that bitsandbytes makes.

bitsandbytes stores packed weights in a tensor subclass, which fake tensors cannot become. Here the
packed weight is a plain parameter; sizes, dtypes and the order of allocations are the library's.
Source: bitsandbytes 0.50.2, nn/modules.py, functional.py and backends/cuda/ops.py (read
2026-11-21): for more than 512 rows the card unpacks the weight and calls the usual linear.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .packages import load_package

_TABLE_VALUES = 16
_NESTED_BLOCK_SIZE = 256
_NESTED_TABLE_VALUES = 256


def quantize(weight: torch.Tensor, layer: Any) -> nn.Parameter:
    """Return the packed 4-bit parameter of a weight that is on the card, without its values."""
    bitsandbytes = load_package("bitsandbytes")
    device, num_values = weight.device, weight.numel()
    num_blocks = -(num_values // -layer.block_size)
    scales = torch.empty(num_blocks, dtype=torch.float32, device=device)
    packed = torch.empty((num_values + 1) // 2, 1, dtype=torch.uint8, device=device)
    table = torch.empty(_TABLE_VALUES, dtype=torch.float32, device=device)
    settings = {
        "shape": weight.shape,
        "code": table,
        "blocksize": layer.block_size,
        "quant_type": layer.quant_type,
        "dtype": weight.dtype,
    }
    state_class = bitsandbytes.functional.QuantState
    if layer.double_quant:
        scales, settings["offset"], settings["state2"] = _quantize_scales(scales, state_class)
    if layer.storage_dtype is not None:
        packed = packed.view(-1).view(layer.storage_dtype).view(-1, 1)
    parameter = nn.Parameter(packed, requires_grad=False)
    state: Any = state_class(absmax=scales, **settings)
    layer.quant_state = parameter.quant_state = state  # type: ignore[attr-defined]
    parameter.quant_type = layer.quant_type  # type: ignore[attr-defined]
    parameter.compress_statistics = layer.double_quant  # type: ignore[attr-defined]
    return parameter


def _quantize_scales(scales: torch.Tensor, state_class: Any) -> tuple[torch.Tensor, ...]:
    """Return 8-bit scales, their mean, and their own scales in blocks of 256."""
    offset = scales.mean()
    centred = scales - offset
    num_blocks = -(scales.numel() // -_NESTED_BLOCK_SIZE)
    table = torch.empty(_NESTED_TABLE_VALUES, dtype=torch.float32, device=scales.device)
    outer = torch.empty(num_blocks, dtype=torch.float32, device=scales.device)
    inner = torch.empty_like(centred, dtype=torch.uint8)
    state = state_class(absmax=outer, code=table, blocksize=_NESTED_BLOCK_SIZE, dtype=torch.float32)
    return inner, offset, state


def place_scales(model: nn.Module, device: str) -> None:
    """Move scales and tables of 4-bit layers, which no parameter holds and FSDP does not shard."""
    for module in model.modules():
        if is_quantized(module):
            state: Any = module.quant_state
            state.absmax, state.code = state.absmax.to(device), state.code.to(device)
            if state.nested:
                state.offset = state.offset.to(device)
                inner = state.state2
                inner.absmax, inner.code = inner.absmax.to(device), inner.code.to(device)


class _Matmul4Bit(torch.autograd.Function):
    """Multiply with a 4-bit weight, which is unpacked in the forward and again in the backward."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, state: Any
    ) -> torch.Tensor:
        ctx.packed, ctx.state = packed, state
        return F.linear(inputs, _unpack(packed, state, inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = gradients
        weight = _unpack(ctx.packed, ctx.state, ctx.state.dtype).to(gradient.dtype)
        return torch.matmul(gradient, weight), None, None, None


def _unpack(packed: torch.Tensor, state: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight in full, in a new tensor."""
    scales = state.absmax
    if state.nested:
        scales = torch.empty_like(state.absmax, dtype=torch.float32) + state.offset
    operator = torch.ops.bitsandbytes.dequantize_4bit.default
    return operator(packed, scales, state.blocksize, state.quant_type, state.shape, dtype)


@cache
def linear_class() -> type[nn.Linear]:
    """Return the class of 4-bit linear layers, which peft takes for that of bitsandbytes."""
    library = load_package("bitsandbytes").nn

    class Linear4bit(library.Linear4bit):  # type: ignore[misc, name-defined]
        """Hold a 4-bit weight as a plain parameter."""

        def __init__(self, layer: nn.Linear, settings: dict[str, Any]) -> None:
            sizes = layer.in_features, layer.out_features
            has_bias = layer.bias is not None
            nn.Linear.__init__(self, *sizes, has_bias, "meta", layer.weight.dtype)
            self.compute_dtype = getattr(torch, settings.get("compute_dtype") or "float32")
            self.quant_type = settings.get("type", "nf4")
            self.double_quant = bool(settings.get("double_quant"))
            storage = settings.get("storage")
            self.storage_dtype = getattr(torch, storage) if storage else None
            self.block_size = int(settings.get("block_size") or 64)
            self.quant_state = None
            self.requires_grad_(False)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            converted = inputs.to(self.compute_dtype)
            bias = self.bias
            if bias is not None and bias.dtype != converted.dtype:
                bias.data = bias.data.to(converted.dtype)  # for good, as the library does
            product: torch.Tensor = _Matmul4Bit.apply(
                converted, self.weight, bias, self.quant_state
            )
            return product.to(inputs.dtype)

    return Linear4bit


def is_quantized(module: nn.Module) -> bool:
    """Return whether a module is a 4-bit linear layer made here."""
    return type(module).__name__ == "Linear4bit" and hasattr(module, "double_quant")


def replace_linears(model: Any, settings: dict[str, Any]) -> None:
    """Put 4-bit layers, still without weights, in the places of linear ones.

    The output layer and what shares its weight stay as they are, as transformers leaves them.
    """
    load_package("transformers")
    base = load_package("transformers.quantizers.base")
    convolution = load_package("transformers.pytorch_utils").Conv1D
    kept = set(base.get_keys_to_not_convert(model))
    for name, module in list(model.named_modules()):
        if any(name == key or name.startswith(f"{key}.") for key in kept):
            continue
        if isinstance(module, convolution):
            num_inputs, num_outputs = module.weight.shape
            layer = nn.Linear(num_inputs, num_outputs, device="meta", dtype=module.weight.dtype)
            model.set_submodule(name, linear_class()(layer, settings))
        elif type(module) is nn.Linear:
            model.set_submodule(name, linear_class()(module, settings))
