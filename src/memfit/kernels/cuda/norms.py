"""Memory that CUDA normalisation layers take inside: partial statistics and coefficients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from memfit.kernels.base import Scratch
from memfit.kernels.cuda.answers import (
    GUESS,
    accumulate_width,
    between,
    ceil_div,
    copied_bytes,
    last_power_of_two,
    num_bytes,
    sure,
)
from memfit.kernels.cuda.card import Card
from memfit.kernels.cuda.reductions import reduction_blocks
from memfit.units import MIB

_NORM_BLOCK_WIDTH = 32
_MANY_ROWS = 64 * 1024
_MAX_NORM_GRID = 64 * 1024 // 2
_ROWS_PER_NORM_BLOCK = 32
_BATCH_NORM_BLOCK, _BATCH_NORM_TILE, _BATCH_NORM_ROWS, _BATCH_NORM_GRID = 512, 32, 16, 128


def layer_norm_backward(
    args: tuple[Any, ...], _kwargs: Mapping[str, Any], _out: Any, card: Card
) -> Scratch:
    """Return partial sums of the gradients of scale and shift, for many short rows only.

    Above 65,536 rows, where a row gives less than half as many blocks as there are
    multiprocessors, each 32 rows are added up on their own, and a sum over these follows.

    Source: LaunchGammaBetaBackwardCUDAKernel in cuda/layer_norm_kernel.cu, main branch.
    """
    return _norm_backward(args[0], args[1], args[5], tuple(args[2]), card, num_sums=2)


def rms_norm_backward(
    args: tuple[Any, ...], _kwargs: Mapping[str, Any], _out: Any, card: Card
) -> Scratch:
    """Return the same as for layer norm, for the scale alone. Source: as there."""
    return _norm_backward(args[0], args[1], args[4], tuple(args[2]), card, num_sums=1)


def _norm_backward(
    grad: torch.Tensor,
    image: torch.Tensor,
    weight: torch.Tensor | None,
    shape: tuple[int, ...],
    card: Card,
    *,
    num_sums: int,
) -> Scratch:
    source = "aten/src/ATen/native/cuda/layer_norm_kernel.cu"
    copies = copied_bytes(grad, image, weight)
    columns = math.prod(shape)
    rows = image.numel() // max(1, columns)
    if rows <= _MANY_ROWS or weight is None:
        return sure(source, copies)
    across = ceil_div(columns, _NORM_BLOCK_WIDTH)
    parts = min(_MAX_NORM_GRID // max(1, across), ceil_div(rows, _ROWS_PER_NORM_BLOCK))
    partial = parts * columns * weight.element_size()
    table = torch.empty((parts, columns), dtype=weight.dtype, device="meta")
    summed = (num_bytes(weight), *reduction_blocks(table, [0], card))
    blocks = (*copies, *(partial,) * num_sums, *summed)
    if columns // _NORM_BLOCK_WIDTH >= card.likely_multiprocessors // 2:
        blocks = copies
    if card.num_multiprocessors is not None:
        return sure(source, blocks)
    high = sum(copies) + num_sums * partial + sum(summed)
    return between(source, blocks, low_bytes=sum(copies), high_bytes=high, certainty=GUESS)


def group_norm_forward(
    args: tuple[Any, ...], _kwargs: Mapping[str, Any], _out: Any, _card: Card
) -> Scratch:
    """Return scale and shift folded with the statistics: two numbers per sample and channel.

    Source: GroupNormKernelImplInternal in cuda/group_norm_kernel.cu, main branch.
    """
    image, weight, bias = args[:3]
    rows, channels, positions = (int(size) for size in args[3:6])
    folds = positions > 1 and (weight is not None or bias is not None)
    per_channel = rows * channels * accumulate_width(image.dtype)
    blocks = (per_channel, per_channel) if folds else ()
    return sure("aten/src/ATen/native/cuda/group_norm_kernel.cu", (*copied_bytes(image), *blocks))


def group_norm_backward(
    args: tuple[Any, ...], _kwargs: Mapping[str, Any], _out: Any, _card: Card
) -> Scratch:
    """Return two sums per channel, one coefficient per channel, two per group.

    Source: GroupNormBackwardKernelImplInternal and GroupNorm1dBackward in
    cuda/group_norm_kernel.cu, main branch.
    """
    grad, image, weight = args[0], args[1], args[4]
    rows, channels, positions, groups = (int(size) for size in args[5:9])
    width = accumulate_width(image.dtype)
    per_channel, per_group = rows * channels * width, rows * groups * width
    sums = (per_channel, per_channel) if positions > 1 else ()
    scale = (per_channel,) if positions > 1 and weight is not None else ()
    coefficients = (*scale, per_group, per_group) if args[9][0] else ()
    return sure(
        "aten/src/ATen/native/cuda/group_norm_kernel.cu",
        (*copied_bytes(grad, image), *sums, *coefficients),
    )


def batch_norm_forward(
    args: tuple[Any, ...], _kwargs: Mapping[str, Any], _out: Any, _card: Card
) -> Scratch:
    """Return for torch's own kernel partial statistics for channels last, nothing for plain layout.

    Source: batch_norm_stats_channels_last_cuda_template in cuda/Normalization.cuh, torch 2.13.
    """
    image, is_training = args[0], bool(args[5])
    blocks = _batch_norm_partials(image, 4) if is_training else ()
    return sure("aten/src/ATen/native/cuda/Normalization.cuh", blocks)


def batch_norm_backward(
    args: tuple[Any, ...], _kwargs: Mapping[str, Any], _out: Any, _card: Card
) -> Scratch:
    """Return for torch's own kernel two sums per channel, and partial sums for channels last.

    Source: batch_norm_backward_reduce_cuda_channels_last_template in cuda/Normalization.cuh.
    """
    image = args[1]
    partials = _batch_norm_partials(image, 2)
    per_channel = int(image.shape[1]) * accumulate_width(image.dtype)
    sums = (per_channel, per_channel) if _is_channel_minor(image) else ()
    return sure("aten/src/ATen/native/cuda/Normalization.cuh", (*sums, *partials))


def _batch_norm_partials(image: torch.Tensor, per_channel: int) -> tuple[int, ...]:
    """Return the staging buffer and the counters of flexible_launch_configs."""
    if not _is_channel_minor(image):
        return ()
    channels = int(image.shape[1])
    rows = image.numel() // max(1, channels)
    width = min(last_power_of_two(channels), _BATCH_NORM_TILE)
    per_block = ceil_div(rows, _BATCH_NORM_ROWS)
    height = min(last_power_of_two(per_block), _BATCH_NORM_BLOCK // width)
    if width * height != _BATCH_NORM_BLOCK:
        width = min(last_power_of_two(channels), _BATCH_NORM_BLOCK // height)
    grid = min(ceil_div(rows, height * _BATCH_NORM_ROWS), _BATCH_NORM_GRID)
    if grid < 8:
        return ()
    staged = per_channel * channels * grid * accumulate_width(image.dtype)
    return (staged, 4 * ceil_div(channels, width))


def _is_channel_minor(image: torch.Tensor) -> bool:
    """Return whether torch's kernel for channels last is used (batch_norm_choose_impl)."""
    if image.is_contiguous():
        return image.stride(1) == 1
    return image.dim() == 4 and image.is_contiguous(memory_format=torch.channels_last)


def cudnn_batch_norm(
    args: tuple[Any, ...], _kwargs: Mapping[str, Any], _out: Any, _card: Card
) -> Scratch:
    """Return cuDNN's workspace: none for plain layout, a guess up to 1 MiB for channels last.

    Source: cudnn/BatchNorm.cpp, main branch.
    """
    image = args[0]
    is_plain = image.is_contiguous()
    return between(
        "aten/src/ATen/native/cudnn/BatchNorm.cpp",
        (),
        low_bytes=0,
        high_bytes=0 if is_plain else MIB,
        certainty=GUESS,
    )


def cudnn_batch_norm_backward(
    args: tuple[Any, ...], _kwargs: Mapping[str, Any], _out: Any, _card: Card
) -> Scratch:
    """Return the same as forward, and a copy of the gradient where its layout isn't the image's."""
    image, grad = args[0], args[1]
    layout = torch.contiguous_format
    if image.dim() == 4 and not image.is_contiguous():
        layout = torch.channels_last
    copies = copied_bytes(grad, memory_format=layout)
    return between(
        "aten/src/ATen/native/cudnn/BatchNorm.cpp",
        copies,
        low_bytes=sum(copies),
        high_bytes=sum(copies) + (0 if image.is_contiguous() else MIB),
        certainty=GUESS,
    )
