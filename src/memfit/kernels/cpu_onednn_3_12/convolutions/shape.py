"""The sizes of one convolution, and how many bytes oneDNN's layouts of its tensors take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.kernels.rounding import round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """The sizes of a convolution; ``width`` is the bytes of an element.

    A convolution over sequences is one over images of height 1, as torch itself treats it.
    """

    batch: int
    num_in: int
    num_out: int
    groups: int
    image: tuple[int, ...]
    result: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    width: int
    has_bias: bool
    is_transposed: bool = False

    @classmethod
    def of(
        cls,
        image: torch.Tensor,
        weight: torch.Tensor,
        result: torch.Tensor,
        settings: Sequence[Any],
        *,
        has_bias: bool,
    ) -> Convolution:
        """Read the sizes off tensors and settings.

        ``settings``: stride, padding, dilation, transposed, output padding, groups. A transposed
        convolution is the one whose gradient it is: its image is the result here, and its bias
        none of that one's.
        """
        if settings[3]:
            image, result = result, image
        num_dims = image.dim() - 2
        stride, padding, dilation = (_per_dim(values, num_dims) for values in settings[:3])
        is_flat = num_dims == 1
        return cls(
            batch=image.shape[0],
            num_in=image.shape[1],
            num_out=result.shape[1],
            groups=settings[5],
            image=(1,) * is_flat + tuple(image.shape[2:]),
            result=(1,) * is_flat + tuple(result.shape[2:]),
            kernel=(1,) * is_flat + tuple(weight.shape[2:]),
            stride=(1,) * is_flat + stride,
            padding=(0,) * is_flat + padding,
            dilation=(1,) * is_flat + dilation,
            width=image.element_size(),
            has_bias=has_bias and not settings[3],
            is_transposed=settings[3],
        )

    @property
    def in_per_group(self) -> int:
        """Return the channels of the image that one channel of the result sees."""
        return self.num_in // self.groups

    @property
    def out_per_group(self) -> int:
        """Return the channels of the result in a group."""
        return self.num_out // self.groups

    @property
    def is_depthwise(self) -> bool:
        """Return whether each channel is convolved alone, for which volumes have no kernels."""
        return len(self.kernel) < 3 and 1 < self.groups == self.num_in == self.num_out

    @property
    def is_pointwise(self) -> bool:
        """Return whether a position of the result sees one position of the image."""
        return math.prod(self.kernel) == 1 and not any(self.padding)

    @property
    def is_strided(self) -> bool:
        """Return whether the kernel skips positions."""
        return max(self.stride) > 1

    @property
    def is_dilated(self) -> bool:
        """Return whether the kernel has gaps."""
        return max(self.dilation) > 1

    @property
    def is_gapped(self) -> bool:
        """Return whether the kernel both skips positions and has gaps, along a column."""
        steps = zip(self.stride[:-1], self.dilation[:-1], strict=True)
        return any(min(stride, dilation) > 1 for stride, dilation in steps)

    @property
    def is_one_product(self) -> bool:
        """Return whether the kernel covers the image, so that there is one position."""
        return (
            self.groups == 1
            and self.kernel == self.image
            and not any(self.padding)
            and not self.is_dilated
            and not self.is_strided
            and math.prod(self.kernel) > 1
        )

    @property
    def is_aligned(self) -> bool:
        """Return whether strides leave no positions over."""
        return all(
            result * stride == image
            for result, stride, image in zip(self.result, self.stride, self.image, strict=True)
        )

    @property
    def is_aligned_image(self) -> bool:
        """Return whether the image is whole steps of the kernel, along every dimension."""
        return not any(
            image % stride for image, stride in zip(self.image, self.stride, strict=True)
        )

    @property
    def is_even(self) -> bool:
        """Return whether the rows of the image are whole steps of the kernel."""
        return self.image[-1] % self.stride[-1] == 0

    @property
    def is_usual(self) -> bool:
        """Test whether the kernel reaches the image from wherever it stands, and rows are long."""
        is_covered = all(
            max(before, after) < reach
            for before, after, reach in zip(
                self.padding, self.padding_after, self.reach, strict=True
            )
        )
        return is_covered and max(self.padding[-1], self.padding_after[-1]) <= self.result[-1]

    @property
    def reach(self) -> tuple[int, ...]:
        """Return the extent of the kernel with its gaps."""
        return tuple(
            dilation * (size - 1) + 1
            for dilation, size in zip(self.dilation, self.kernel, strict=True)
        )

    @property
    def padding_after(self) -> tuple[int, ...]:
        """Return the padding that the kernel uses at the far end."""
        return tuple(
            (result - 1) * stride + reach - image - padding
            for result, stride, reach, image, padding in zip(
                self.result, self.stride, self.reach, self.image, self.padding, strict=True
            )
        )

    def image_bytes(self, block: int = 1) -> int:
        """Return the bytes of the image with its channels in blocks."""
        return self.batch * round_up(self.num_in, block) * math.prod(self.image) * self.width

    def result_bytes(self, block: int = 1) -> int:
        """Return the bytes of the result with its channels in blocks."""
        return self.batch * round_up(self.num_out, block) * math.prod(self.result) * self.width

    def weight_bytes(self, block_out: int = 1, block_in: int = 1) -> int:
        """Return the bytes of the weight with the channels of a group in blocks."""
        channels = round_up(self.out_per_group, block_out) * round_up(self.in_per_group, block_in)
        return self.groups * channels * math.prod(self.kernel) * self.width

    def depthwise_weight_bytes(self, block: int) -> int:
        """Return the bytes of a depthwise weight with groups in blocks."""
        return round_up(self.groups, block) * math.prod(self.kernel) * self.width


def _per_dim(values: Sequence[int], num_dims: int) -> tuple[int, ...]:
    return tuple(values) if len(values) == num_dims else tuple(values) * num_dims
