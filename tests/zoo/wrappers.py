"""Tensor subclasses of a user's own, and jobs that train with them."""

from __future__ import annotations

from typing import Any

import torch
from tests.zoo.small_jobs import mean_square_job, sgd
from torch import nn
from torch.utils._pytree import tree_map_only

from memfit import Job

_ATEN = torch.ops.aten
_STAY_WRAPPED = (
    _ATEN.detach.default,
    _ATEN.clone.default,
    _ATEN._to_copy.default,
    _ATEN.empty_like.default,
    _ATEN.zeros_like.default,
)


class Sealed(torch.Tensor):
    """A wrapper that does not say what it is made of: values in bf16 and a scale."""

    coarse: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, coarse: torch.Tensor, scale: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls, coarse.shape, dtype=scale.dtype, device=coarse.device
        )

    def __init__(self, coarse: torch.Tensor, scale: torch.Tensor) -> None:
        self.coarse, self.scale = coarse, scale

    @classmethod
    def of(cls, values: torch.Tensor):
        """Wrap values."""
        scale = torch.ones(values.shape[0], 1, dtype=values.dtype, device=values.device)
        return cls(values.to(torch.bfloat16), scale)

    def values(self) -> torch.Tensor:
        """Make the values."""
        return (self.coarse * self.scale).to(self.scale.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _STAY_WRAPPED:
            # The type that it seems to have is that of its scale.
            of_coarse = {name: each for name, each in kwargs.items() if name != "dtype"}
            return cls(func(args[0].coarse, **of_coarse), func(args[0].scale, **kwargs))
        plain_args, plain_kwargs = tree_map_only(cls, cls.values, (args, kwargs))
        out = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable and isinstance(args[0], cls):
            args[0].coarse.copy_(out)
            return args[0]
        return out


class Wrapped(Sealed):
    """The same wrapper, which says what it is made of."""

    def __tensor_flatten__(self):
        return ["coarse", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any):
        return cls(inner["coarse"], inner["scale"])


def wrapped_weights(kind: type[Sealed], width: int = 512) -> nn.Module:
    """Return a model whose large weight is a wrapper."""
    model = nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh(), nn.Linear(width, 8))
    model[0].weight = nn.Parameter(kind.of(model[0].weight.detach()))
    return model


def wrapped_job(kind: type[Sealed], width: int = 512, optimizer=sgd) -> Job:
    """Return a job whose model has a wrapper for a weight."""
    return mean_square_job(lambda: wrapped_weights(kind, width), width, optimizer=optimizer)
