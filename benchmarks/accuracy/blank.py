"""Constructors that compute with values, run where tensors have none.

Some vision models work out their widths with tensors. Their constructor runs on real memory that
is never touched, and every tensor is then made anew in the mode that was on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._mode_utils import no_dispatch


def has_no_values() -> bool:
    """Return whether tensors made now have no values: fake ones, or those of the meta device."""
    key = torch._C._TorchDispatchModeKey.FAKE
    return torch._C._get_dispatch_mode(key) is not None or torch.empty(0).device.type == "meta"


def build_without_values(builder: Callable[[], nn.Module]) -> nn.Module:
    """Call a constructor for real, then give the model tensors of the mode outside."""
    with no_dispatch(), torch.device("cpu"), _untouched_weights():
        model = builder()
    remade: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = _remade(tensor, remade)  # type: ignore[assignment]
    return model


def _remade(tensor: torch.Tensor, remade: dict[int, torch.Tensor]) -> torch.Tensor:
    """Make one tensor anew, once however many modules share it."""
    if id(tensor) not in remade:
        blank = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            blank = nn.Parameter(blank, requires_grad=tensor.requires_grad)
        remade[id(tensor)] = blank
    return remade[id(tensor)]


@contextmanager
def _untouched_weights() -> Iterator[None]:
    """Draw no initial weights, so that their memory is never touched."""
    names = [name for name in vars(nn.init) if name.endswith("_") and not name.startswith("__")]
    with patch.multiple(nn.init, **dict.fromkeys(names, _unchanged)):
        yield


def _unchanged(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return tensor
