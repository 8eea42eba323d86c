"""Which kernel computes a convolution on a CUDA device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

import torch

from memfit.kernels.cuda.card import Card

_FEWEST_CUDNN_DEPTHWISE = 32


class Kernel(StrEnum):
    """Name who computes a convolution."""

    CUDNN = "cudnn"
    DEPTHWISE = "depthwise"
    """Torch's own kernel for one input channel per group; it takes nothing inside."""
    UNFOLDED = "unfolded"
    """Torch's own matrix product over an image unfolded into columns, one image at a time."""


class Pass(StrEnum):
    """Name what a convolution computes."""

    FORWARD = "forward"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENT = "weight gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """One convolution: image (N, C, ...), weight, result (N, K, ...) or its gradient, settings."""

    image: torch.Tensor
    weight: torch.Tensor
    result: torch.Tensor
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    is_transposed: bool
    groups: int

    @classmethod
    def of(cls, result: torch.Tensor, arguments: Mapping[str, Any]) -> Self:
        """Read a convolution, or its backward, off its arguments."""
        return cls(
            image=arguments["input"],
            weight=arguments["weight"],
            result=result,
            stride=arguments["stride"],
            padding=arguments["padding"],
            dilation=arguments["dilation"],
            is_transposed=arguments["transposed"],
            groups=arguments["groups"],
        )

    @property
    def kernel_size(self) -> tuple[int, ...]:
        """Return the extents of the kernel."""
        return tuple(self.weight.shape[2:])

    @property
    def memory_format(self) -> torch.memory_format:
        """Return the layout cuDNN is handed: channels last if image or weight is laid out so."""
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        last = formats.get(self.image.dim())
        if last is not None and any(_is_only(t, last) for t in (self.image, self.weight)):
            return last
        return torch.contiguous_format

    @property
    def is_depthwise(self) -> bool:
        """Return whether each group has one input channel (is_depthwise)."""
        channels = int(self.image.shape[1])
        return (
            not self.is_transposed
            and self.image.dim() in (4, 5)
            and channels == self.groups > 1
            and int(self.weight.shape[0]) % channels == 0
        )

    @property
    def column_bytes(self) -> int:
        """Return the bytes of one image of one group unfolded: a column per position."""
        spread = self.image if self.is_transposed else self.result
        rows = int(self.weight.shape[1]) * math.prod(self.kernel_size)
        return rows * math.prod(spread.shape[2:]) * self.image.element_size()

    @property
    def needs_columns(self) -> bool:
        """Return whether forward unfolds: an image is its own columns for a plain 1 x 1 kernel."""
        settings = (*self.kernel_size, *self.stride, *self.dilation)
        return self.is_transposed or any(s != 1 for s in settings) or any(self.padding)

    def kernel(self, card: Card) -> Kernel:
        """Say who computes it on a card.

        cuDNN is used for everything except: bf16 below compute capability 8.0 (so on T4 and V100),
        and one channel per group in plain layout unless it is fp16, with 32 channels or more.

        Source: ``use_cudnn``, ``use_cudnn_depthwise`` in aten/src/ATen/native/Convolution.cpp and
        ``supportsBFloat16ConvolutionWithCuDNNv8`` in aten/src/ATen/cuda/detail/CUDAHooks.cpp, main
        branch, read 2026-11-21. Of fp16's further conditions on sizes none is followed: both
        kernels take next to nothing.
        """
        is_bf16 = torch.bfloat16 in (self.image.dtype, self.weight.dtype)
        has_cudnn = not is_bf16 or card.capability[0] >= 8
        if self.is_depthwise:
            is_plain = self.memory_format == torch.contiguous_format
            return Kernel.DEPTHWISE if is_plain and not self._suits_cudnn() else Kernel.CUDNN
        return Kernel.CUDNN if has_cudnn else Kernel.UNFOLDED

    def _suits_cudnn(self) -> bool:
        return (
            self.image.dtype == self.weight.dtype == torch.float16
            and self.image.dim() == 4
            and all(d == 1 for d in self.dilation)
            and int(self.image.shape[1]) >= _FEWEST_CUDNN_DEPTHWISE
        )


def _is_only(tensor: torch.Tensor, layout: torch.memory_format) -> bool:
    if tensor.dim() not in (4, 5) or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=layout)
