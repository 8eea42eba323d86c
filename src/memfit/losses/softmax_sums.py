"""Sums over a set, weighted by a softmax over the whole set, of which one part is seen at a time.

Shape suffixes: B samples, C members in a chunk, M entries of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from memfit.losses.ranks import gathered

if TYPE_CHECKING:
    from memfit.losses.ranks import Group


@dataclass(slots=True, kw_only=True)
class SoftmaxSums:
    """What has been seen so far, for each sample: 2 + M numbers.

    Every weight is relative to the highest one so far, so nothing overflows.

    Source: Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867, algorithm 3, with values
    beside the normaliser.
    """

    highest: Tensor
    total: Tensor
    sums: list[Tensor]
    """Each (B, M...)."""

    @classmethod
    def empty(cls, num_samples: int, log_weight_BC: Tensor, values: Sequence[Tensor]) -> Self:
        """Start with nothing, for log-weights and values of this kind."""
        dtype = torch.promote_types(log_weight_BC.dtype, torch.float32)
        highest_B = log_weight_BC.new_full((num_samples,), -torch.inf, dtype=dtype)
        return cls(
            highest=highest_B,
            total=torch.zeros_like(highest_B),
            sums=[highest_B.new_zeros((num_samples, *value.shape[2:])) for value in values],
        )

    def add(self, rows: slice, log_weight_BC: Tensor, values: Sequence[Tensor]) -> None:
        """Add members, for some of the samples."""
        log_weight_BC = log_weight_BC.to(self.highest.dtype)
        before_B = self.highest[rows]
        highest_B = torch.maximum(before_B, log_weight_BC.amax(1))
        # Where no member has any weight yet, the highest is no number to subtract.
        base_B = highest_B.masked_fill(highest_B == -torch.inf, 0.0)
        shrink_B = torch.exp(before_B - base_B)
        weight_BC = torch.exp(log_weight_BC - base_B[:, None])
        self.highest[rows] = highest_B
        self.total[rows] = self.total[rows].mul_(shrink_B).add_(weight_BC.sum(1))
        for sums, value in zip(self.sums, values, strict=True):
            part_BM = sums[rows].flatten(1) if sums.dim() > 1 else sums[rows][:, None]
            part_BM.mul_(shrink_B[:, None]).add_(weighted_sum(weight_BC, value))

    def merge(self, group: Group) -> None:
        """Add what every other rank of the group has seen, with one all-gather of B (2 + M)."""
        parts = [self.highest[:, None], self.total[:, None]]
        own = torch.cat([*parts, *(each.reshape(len(each), -1) for each in self.sums)], dim=1)
        found = gathered(own, group)
        highest_RB = found[..., 0]
        self.highest = highest_RB.amax(0)
        base_B = self.highest.masked_fill(self.highest == -torch.inf, 0.0)
        scale_RB = torch.exp(highest_RB - base_B)
        added = torch.einsum("rb,rbm->bm", scale_RB, found[..., 1:])
        self.total, rest = added[:, 0].clone(), added[:, 1:]
        widths = [each[0].numel() for each in self.sums]
        self.sums = [
            part.reshape(each.shape)
            for part, each in zip(rest.split(widths, dim=1), self.sums, strict=True)
        ]

    def results(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the log-sum-exp (B,) and the means (B, M...)."""
        base_B = self.highest.masked_fill(self.highest == -torch.inf, 0.0)
        means = tuple(each / self.total.reshape(-1, *(1,) * (each.dim() - 1)) for each in self.sums)
        return base_B + torch.log(self.total), means


def weighted_sum(weight_BC: Tensor, value: Tensor) -> Tensor:
    """Add up values (B, C, M...) over the members, into (B, M)."""
    value_BCM = value.reshape(*value.shape[:2], -1).to(weight_BC.dtype)
    return _product(weight_BC[:, None, :], value_BCM)[:, 0]


def term_gradients(
    log_weight_BC: Tensor,
    values: Sequence[Tensor],
    results: Sequence[Tensor],
    gradients: Sequence[Any],
) -> list[Tensor]:
    """Return the gradients of a chunk's log-weights and values.

    With p = softmax over the whole set, d mean = sum p dv + sum p (v - mean) dl, and
    d log-sum-exp = sum p dl.

    Args:
        log_weight_BC: of the chunk.
        values: of the chunk, each (B, C, M...).
        results: log-sum-exp (B,) and means (B, M...), over the whole set.
        gradients: of each of ``results``; None where the loss does not depend on it.
    """
    log_sum_exp_B, *means = results
    gradient_B, *mean_gradients = gradients
    weight_BC = torch.exp(log_weight_BC.to(log_sum_exp_B.dtype) - log_sum_exp_B[:, None])
    factor_BC = torch.zeros_like(weight_BC) if gradient_B is None else gradient_B[:, None]
    of_values = []
    for value, mean, gradient in zip(values, means, mean_gradients, strict=True):
        if gradient is None:
            of_values.append(torch.zeros_like(value))
            continue
        gradient_BM = gradient.reshape(len(gradient), -1)
        value_BCM = value.reshape(*value.shape[:2], -1).to(gradient.dtype)
        shift_B = (gradient_BM * mean.reshape(len(mean), -1)).sum(1)
        along_BC = _product(value_BCM, gradient_BM[:, :, None])[..., 0]
        factor_BC = factor_BC + along_BC - shift_B[:, None]
        of_value = weight_BC[:, :, None] * gradient_BM[:, None, :]
        of_values.append(of_value.reshape(value.shape).to(value.dtype))
    return [(weight_BC * factor_BC).to(log_weight_BC.dtype), *of_values]


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices in the type that they have, whatever autocast would make of them."""
    with torch.autocast(left.device.type, enabled=False):
        return torch.bmm(left, right)
