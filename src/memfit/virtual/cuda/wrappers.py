"""Gives wrappers on the virtual GPU the faces that its fake tensors have.

A wrapper, such as torchao's optimizer states or a DTensor, is made with the device of the tensors
inside. A build of torch without CUDA makes it, and then cannot dispatch its operators. So to C++ it
lies on the card's meta device, and to Python on ``cuda:0``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch

from memfit.virtual.cuda.placement import CARD, META_OF_CARD, device_meant

_make_as_torch_does_it: Any = torch.Tensor._make_wrapper_subclass
_device_as_torch_tells_it: Any = torch.Tensor.device.__get__
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
"""Autocast on the card works with the CPU's key, as the dispatch keys of fake tensors are."""


_PLACES = (
    *("strides", "storage_offset", "memory_format", "dtype", "layout", "device", "pin_memory"),
    *("requires_grad", "dispatch_sizes_strides_policy", "dispatch_device", "dispatch_layout"),
    *("_extra_dispatch_keys", "storage_size"),
)
"""The arguments of ``_make_wrapper_subclass`` after class and size, which nested tensors give by
position (torch/csrc/autograd/python_variable.cpp, torch 2.13)."""


def wrappers() -> Iterator[Any]:
    """Yield the replacements that give wrappers on the virtual GPU their faces."""
    yield patch.object(torch.Tensor, "_make_wrapper_subclass", staticmethod(_make), create=True)
    faces = {
        "device": _device,
        "is_cuda": lambda tensor: _device(tensor).type == "cuda",
        "is_meta": lambda tensor: _device(tensor).type == "meta",
    }
    for name, face in faces.items():
        yield patch.object(torch.Tensor, name, property(face), create=True)


def _make(kind: type, shape: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a wrapper; one on the card lies on the card's meta device for C++."""
    kwargs |= zip(_PLACES, args, strict=False)
    device = kwargs.get("device")
    if device is not None and device_meant(device) == CARD:
        keys = kwargs.get("_extra_dispatch_keys")
        keys = _AUTOCAST if keys is None else keys | _AUTOCAST
        kwargs |= {"device": META_OF_CARD, "_extra_dispatch_keys": keys}
    return _make_as_torch_does_it(kind, shape, **kwargs)


def _device(tensor: torch.Tensor) -> torch.device:
    """Return the device that is meant; what C++ makes, as DTensors, lies where it is told."""
    with torch._C.DisableTorchFunction():
        return device_meant(_device_as_torch_tells_it(tensor))
