"""Batch normalisation with the statistics of a whole batch, while micro-batches pass through."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self
from unittest.mock import patch

import torch

from memfit.errors import StrategyError
from memfit.separation.step_ends import is_batch_norm
from memfit.strategies.facts import BatchNorm


class LayerReachedError(BaseException):
    """Stop a forward at a normalisation call, and carry the call's input out.

    No ``Exception``, so that no handler in a model or a loss takes it for a failure.
    """

    def __init__(self, module: BatchNorm, inputs: torch.Tensor) -> None:
        super().__init__()
        self.module = module
        self.inputs = inputs


@dataclass(frozen=True, slots=True)
class PartialStatistics:
    """Statistics over some micro-batches: count, and per channel mean and squared deviations."""

    module: BatchNorm
    count: int
    mean: torch.Tensor
    squares: torch.Tensor

    @classmethod
    def of(cls, reached: LayerReachedError) -> Self:
        """Take the statistics of one micro-batch, in fp32 or better. Shape (N, channels, ...)."""
        inputs = reached.inputs.detach()
        inputs = inputs if inputs.dtype is torch.float64 else inputs.float()
        dims = [dim for dim in range(inputs.dim()) if dim != 1]
        count = inputs.numel() // inputs.shape[1]
        variance, mean = torch.var_mean(inputs, dims, correction=0)
        return cls(reached.module, count, mean, variance * count)

    def merged_with(self, other: PartialStatistics) -> PartialStatistics:
        """Merge two parts without loss of precision.

        Source: Chan, Golub, LeVeque 1983, "Algorithms for computing the sample variance",
        equation 2.1.
        """
        count = self.count + other.count
        difference = other.mean - self.mean
        mean = self.mean + difference * (other.count / count)
        between = difference.square() * (self.count * other.count / count)
        return PartialStatistics(self.module, count, mean, self.squares + other.squares + between)


class Statistics:
    """Mean and biased variance of one normalisation call over the whole batch, per channel.

    Both are leaves, so that gradients with respect to them can be taken.
    """

    def __init__(self, whole: PartialStatistics) -> None:
        self._module = whole.module
        self._count = whole.count
        with torch.enable_grad():
            self._mean = whole.mean.detach().requires_grad_()
            self._variance = (whole.squares / whole.count).detach().requires_grad_()

    def normalise(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalise a micro-batch, shape (N, channels, ...), in its own dtype."""
        module = self._module
        shape = (1, -1) + (1,) * (inputs.dim() - 2)
        scale = (self._variance + module.eps).rsqrt()
        if module.weight is not None:
            scale = scale * module.weight
        shift = -self._mean * scale
        if module.bias is not None:
            shift = shift + module.bias
        out = torch.addcmul(shift.view(shape), inputs.to(scale.dtype), scale.view(shape))
        return out.to(inputs.dtype)

    def gradient_through(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the gradient that reaches a micro-batch through mean and variance.

        With mean = sum(x) / N and variance = sum((x - mean)^2) / N it is
        (d_mean + 2 (x - mean) d_variance) / N; the variance does not change with the mean.
        """
        shape = (1, -1) + (1,) * (inputs.dim() - 2)
        slope = (self._gradient(self._variance) * (2.0 / self._count)).view(shape)
        offset = (self._gradient(self._mean) / self._count).view(shape)
        deviation = inputs.to(slope.dtype) - self._mean.detach().view(shape)
        return torch.addcmul(offset, deviation, slope).to(inputs.dtype)

    @torch.no_grad()
    def update_running(self) -> None:
        """Update the layer's running statistics, once for the whole batch, as the layer would."""
        module = self._module
        if not module.track_running_stats or module.running_mean is None:
            return
        assert module.num_batches_tracked is not None
        assert module.running_var is not None
        module.num_batches_tracked.add_(1)
        momentum = module.momentum
        if momentum is None:
            momentum = 1.0 / float(module.num_batches_tracked)
        unbiased = self._variance * (self._count / max(1, self._count - 1))
        module.running_mean.lerp_(self._mean.to(module.running_mean.dtype), momentum)
        module.running_var.lerp_(unbiased.to(module.running_var.dtype), momentum)

    @staticmethod
    def _gradient(leaf: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


class NormalisationCalls:
    """Stand in for a model's batch normalisation layers, call by call in the order of a forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.known: list[Statistics] = []
        self._modules: list[Any] = [*filter(is_batch_norm, model.modules())]
        self._next_call = 0
        self._stop_at: int | None = None
        self._replaced = ExitStack()

    def __enter__(self) -> Self:
        for module in self._modules:
            forward = partial(self._forward, module)
            self._replaced.enter_context(patch.object(module, "forward", forward))
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._replaced.close()

    def begin_forward(self, stop_at: int | None) -> None:
        """Start counting calls anew; stop at one of them, or run through."""
        self._next_call = 0
        self._stop_at = stop_at

    def _forward(self, module: BatchNorm, inputs: torch.Tensor) -> torch.Tensor:
        call = self._next_call
        self._next_call += 1
        if call == self._stop_at:
            raise LayerReachedError(module, inputs)
        if call >= len(self.known):
            raise StrategyError(
                "batchnorm-replay",
                "the model normalises more often for one micro-batch than for another.",
            )
        return self.known[call].normalise(inputs)
