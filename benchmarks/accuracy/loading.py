"""Models loaded straight onto the card, allocation by allocation as transformers does it.

The order matters for what the caching allocator keeps: first one block as large as the model,
given back at once; then each weight in the order of its name, quantized where it must be; then the
buffers that no checkpoint has. Source: transformers 5.0.0 and 5.17.0, modeling_utils.py
(caching_allocator_warmup) and core_model_loading.py (read 2026-11-21).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .quantized import is_quantized, quantize
from .rows import Row

_KEPT_FREE_BYTES = 1_288_490_188  # 1.2 GiB, which the first block leaves free
_PACKED_BYTES_PER_VALUE = 0.5


def load_on_card(model: Any, row: Row, dtype: torch.dtype, device: str) -> None:
    """Give a model built on the meta device its weights on the card, one after the other.

    Where threads read ahead, ``read_ahead`` puts the recorded events into another order.
    """
    names = _checkpoint_names(model)
    _warm_up(model, names, dtype, device, row.device_total_bytes)
    for name in names:
        _assign(model, name, _loaded(model, name, dtype, device))
    _place_buffers(model, device)
    model.tie_weights()


def load_one_by_one(model: Any, dtype: torch.dtype, device: str) -> None:
    """Give a model built on the meta device its weights, as versions before 5 load them."""
    for name in _checkpoint_names(model):
        _assign(model, name, _loaded(model, name, dtype, device))
    _place_buffers(model, device)
    model.tie_weights()


def _checkpoint_names(model: Any) -> list[str]:
    """Return the names of the stored weights in the order in which they are loaded."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    names = [name for name in model.state_dict() if name not in tied]
    return sorted(names, key=_natural_key)


def _natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    parts = name.split(".")
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts)


def _warm_up(
    model: Any, names: list[str], dtype: torch.dtype, device: str, total_bytes: int | None
) -> None:
    """Take one block as large as the model and give it back."""
    num_bytes = 0.0
    for name in names:
        module, attribute = _owner(model, name)
        tensor = getattr(module, attribute)
        packed = is_quantized(module) and attribute == "weight"
        width = dtype.itemsize if tensor.is_floating_point() else tensor.element_size()
        num_bytes += tensor.numel() * (_PACKED_BYTES_PER_VALUE if packed else width)
    if total_bytes is not None:
        num_bytes = min(num_bytes, total_bytes - _KEPT_FREE_BYTES)
    torch.empty(int(num_bytes // 2), dtype=torch.float16, device=device)


def _owner(model: nn.Module, name: str) -> tuple[Any, str]:
    """Find the module that holds a tensor, and its name there."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def _loaded(model: nn.Module, name: str, dtype: torch.dtype, device: str) -> torch.Tensor:
    module, attribute = _owner(model, name)
    tensor = getattr(module, attribute)
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=kind, device=device)


def _assign(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    module, attribute = _owner(model, name)
    if attribute in module._buffers:
        module._buffers[attribute] = tensor
    elif is_quantized(module) and attribute == "weight":
        module._parameters[attribute] = quantize(tensor, module)
    else:
        needs_gradient = getattr(module, attribute).requires_grad
        module._parameters[attribute] = nn.Parameter(tensor, requires_grad=needs_gradient)


def _place_buffers(model: nn.Module, device: str) -> None:
    """Put the buffers on the card that are stored in no checkpoint."""
    for module in model.modules():
        for name, buffer in _left_behind(module):
            module._buffers[name] = torch.empty_like(buffer, device=device)


def _left_behind(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, buffer in list(module._buffers.items()):
        if buffer is not None and buffer.device.type == "meta":
            yield name, buffer
