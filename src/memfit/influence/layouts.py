"""Finds out which rows of an operator's output belong to which sample.

The gradient of a weighted sum of losses is, in the rows of a sample, the gradient of the plain sum
times that sample's weight. Two backward passes tell each row's sample, however the model has
folded, moved or flattened the dimension of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ROUGH = 0.05
"""How far rounding of 16-bit numbers on the way may put a gradient off; others are off by more than
a tenth, as no two weights are alike."""
_FAR = 10.0


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the samples of a batch lie in a tensor."""

    dim: int
    """The dimension whose size is a multiple of the number of samples."""
    is_major: bool
    """Whether a sample's entries in it are neighbours, rather than spread at equal distances."""
    num_samples: int
    """B."""

    def by_sample(self, tensor: Tensor) -> Tensor:
        """Bring the samples to the front.

        Args:
            tensor: (..., B x K, ...), where B x K is the dimension ``dim``.

        Returns:
            (B, ..., K, ...), a view where that is possible.
        """
        num_each = tensor.shape[self.dim] // self.num_samples
        is_major, num_samples = self.is_major, self.num_samples
        parts = (num_samples, num_each) if is_major else (num_each, num_samples)
        shape = (*tensor.shape[: self.dim], *parts, *tensor.shape[self.dim + 1 :])
        return tensor.reshape(shape).movedim(self.dim + (not self.is_major), 0)

    def spread(self, weights: Tensor, shape: Sequence[int]) -> Tensor:
        """Repeat (B,) so that it can be multiplied with a tensor of this layout and shape."""
        num_each = shape[self.dim] // len(weights)
        column = weights.repeat_interleave(num_each) if self.is_major else weights.repeat(num_each)
        return column.reshape(-1, *(1 for _ in shape[self.dim + 1 :]))


def layout_of(plain: Tensor, weighted: Tensor, weights: Tensor) -> tuple[Layout | None, bool]:
    """Find the layout under which each sample's gradient has grown by its weight.

    Each sample counts the same, however small its gradient is beside others.

    Args:
        plain: the gradient of the sum of losses, of any shape.
        weighted: the gradient of the sum of losses times their weights.
        weights: (B,), no two alike.

    Returns:
        The layout, None where samples are mixed; and whether it is certain, which it is not where
        most gradients are zero, or for a single sample.
    """
    errors = [
        (_error(plain, weighted, weights, layout), layout)
        for layout in _possible(plain.shape, len(weights))
    ]
    bound = 1e-8 if plain.dtype is torch.float64 else _ROUGH
    fitting = sorted((pair for pair in errors if pair[0] <= bound), key=lambda pair: pair[0])
    if not fitting:
        return None, True
    is_certain = len(fitting) == 1 or fitting[0][0] * _FAR < fitting[1][0]
    return fitting[0][1], is_certain


def _error(plain: Tensor, weighted: Tensor, weights: Tensor, layout: Layout) -> float:
    """Return how far samples are from having grown by their weights, relative, on average."""
    off = weighted - plain * layout.spread(weights, plain.shape)
    scale_B = layout.by_sample(plain).reshape(len(weights), -1).norm(dim=1)
    off_B = layout.by_sample(off).reshape(len(weights), -1).norm(dim=1)
    counts_B = scale_B > scale_B.max() * 4 * torch.finfo(scale_B.dtype).eps
    number = int(counts_B.sum())
    return float((off_B / scale_B)[counts_B].sum()) / number if number else 0.0


def sample_weights(losses: Tensor) -> Tensor:
    """Make a weight for each of losses (B,): between 1 and 2, no two alike, in no regular order."""
    steps = torch.arange(1, len(losses) + 1, dtype=losses.dtype, device=losses.device)
    return 1.0 + torch.frac(steps * ((math.sqrt(5.0) - 1.0) / 2.0))


def tolerance_of(dtype: torch.dtype) -> float:
    """Return how far two computations of one gradient may be apart, relative to its norm."""
    return 1e-8 if dtype is torch.float64 else max(1e-3, 8 * torch.finfo(dtype).eps)


def _possible(shape: Sequence[int], num_samples: int) -> Iterator[Layout]:
    """Yield every layout that a shape allows; the most usual first."""
    for dim, size in enumerate(shape):
        if size and size % num_samples == 0:
            yield Layout(dim, is_major=True, num_samples=num_samples)
            if size != num_samples and num_samples > 1:
                yield Layout(dim, is_major=False, num_samples=num_samples)
