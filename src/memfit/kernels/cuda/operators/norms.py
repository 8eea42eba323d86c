"""Memory that CUDA normalisation layers take inside: partial statistics and coefficients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch

from memfit.figures import Certainty
from memfit.kernels.cuda.card import Card
from memfit.kernels.cuda.operators.reductions import reduction_blocks
from memfit.kernels.registration import Operator
from memfit.kernels.rounding import ceil_div, last_power_of_two
from memfit.kernels.scratch import Scratch
from memfit.kernels.tensor_bytes import accumulate_width, copied_bytes, num_bytes
from memfit.units import MIB

_aten = torch.ops.aten
_LAYER_NORM = "aten/src/ATen/native/cuda/layer_norm_kernel.cu"
_GROUP_NORM = "aten/src/ATen/native/cuda/group_norm_kernel.cu"
_BATCH_NORM = "aten/src/ATen/native/cuda/Normalization.cuh"
_CUDNN = "aten/src/ATen/native/cudnn/BatchNorm.cpp"
_FUSED_RMS_NORM_SINCE = (2, 9)
_NORM_BLOCK_WIDTH = 32
_MANY_ROWS = 64 * 1024
_MAX_NORM_GRID = 64 * 1024 // 2
_ROWS_PER_NORM_BLOCK = 32
_BATCH_NORM_BLOCK, _BATCH_NORM_TILE, _BATCH_NORM_ROWS, _BATCH_NORM_GRID = 512, 32, 16, 128


# --- Layer norm and RMS norm ---


def _layer_norm_backward(
    *,
    grad_out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    normalized_shape: Sequence[int],
    output_mask: Sequence[bool],
    card: Card,
) -> Scratch:
    """Return partial sums of the gradients of scale and shift, for many short rows only.

    RMS norm has a scale alone. Above 65,536 rows, where a row gives less than half as many blocks
    as there are multiprocessors, each 32 rows are added up on their own, and a sum over these
    follows.

    Source: LaunchGammaBetaBackwardCUDAKernel in cuda/layer_norm_kernel.cu, main branch.
    """
    copies = copied_bytes(grad_out, input, weight)
    columns = math.prod(normalized_shape)
    rows = input.numel() // max(1, columns)
    if rows <= _MANY_ROWS or weight is None:
        return Scratch.exact(_LAYER_NORM, copies)
    across = ceil_div(columns, _NORM_BLOCK_WIDTH)
    parts = min(_MAX_NORM_GRID // max(1, across), ceil_div(rows, _ROWS_PER_NORM_BLOCK))
    num_sums = len(output_mask) - 1
    sum_bytes = parts * columns * weight.element_size()
    table = torch.empty((parts, columns), dtype=weight.dtype, device="meta")
    summed = (num_bytes(weight), *reduction_blocks(table, [0], card))
    blocks = (*copies, *(sum_bytes,) * num_sums, *summed)
    if card.by_multiprocessors(partial(_fills_half, columns // _NORM_BLOCK_WIDTH)):
        blocks = copies
    if card.knows_multiprocessors:
        return Scratch.exact(_LAYER_NORM, blocks)
    return Scratch.between(
        _LAYER_NORM,
        blocks,
        low_bytes=sum(copies),
        high_bytes=sum(copies) + num_sums * sum_bytes + sum(summed),
        certainty=Certainty.GUESS,
    )


def _fills_half(num_blocks: int, num_multiprocessors: int) -> bool:
    return num_blocks >= num_multiprocessors // 2


def _rms_norm(
    *,
    input: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None,
    eps: float | None,
    card: Card,
) -> Any:
    """Take the fused kernel (aten/src/ATen/native/layer_norm.cpp, ``rms_norm_symint``)."""
    has_kernel = card.torch_version >= _FUSED_RMS_NORM_SINCE and hasattr(_aten, "_fused_rms_norm")
    if not has_kernel or (weight is not None and weight.dtype is not input.dtype):
        return NotImplemented
    return _FusedRmsNorm.apply(input, normalized_shape, weight, eps)


class _FusedRmsNorm(torch.autograd.Function):
    """The fused kernel and its gradient, which autograd takes apart for the CPU's dispatch keys.

    Source: ``_fused_rms_norm`` in tools/autograd/derivatives.yaml.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        shape: list[int],
        weight: torch.Tensor | None,
        eps: float | None,
    ) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out, scale = _aten._fused_rms_norm(tensor, shape, weight, eps)
        ctx.shape = shape
        ctx.save_for_backward(tensor, weight, scale)
        return cast(torch.Tensor, out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        tensor, weight, scale = ctx.saved_tensors
        is_wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with torch._C._AutoDispatchBelowAutograd():
            grad_tensor, grad_weight = _aten._fused_rms_norm_backward(
                grad, tensor, ctx.shape, scale, weight, is_wanted
            )
        return grad_tensor, None, grad_weight, None


# --- Group norm ---


def _group_norm(
    *, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> Scratch:
    """Return scale and shift folded with the statistics: two numbers per sample and channel.

    Source: GroupNormKernelImplInternal in cuda/group_norm_kernel.cu, main branch.
    """
    folds = math.prod(input.shape[2:]) > 1 and (weight is not None or bias is not None)
    per_channel = math.prod(input.shape[:2]) * accumulate_width(input.dtype)
    blocks = (per_channel, per_channel) if folds else ()
    return Scratch.exact(_GROUP_NORM, (*copied_bytes(input), *blocks))


def _group_norm_backward(
    *,
    grad_out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    group: int,
    output_mask: Sequence[bool],
) -> Scratch:
    """Return two sums per channel, one coefficient per channel, two per group.

    Source: GroupNormBackwardKernelImplInternal and GroupNorm1dBackward in
    cuda/group_norm_kernel.cu, main branch.
    """
    width = accumulate_width(input.dtype)
    per_channel = math.prod(input.shape[:2]) * width
    per_group = int(input.shape[0]) * group * width
    has_positions = math.prod(input.shape[2:]) > 1
    sums = (per_channel, per_channel) if has_positions else ()
    scale = (per_channel,) if has_positions and weight is not None else ()
    coefficients = (*scale, per_group, per_group) if output_mask[0] else ()
    return Scratch.exact(_GROUP_NORM, (*copied_bytes(grad_out, input), *sums, *coefficients))


# --- Batch norm: torch's own kernel, and cuDNN's ---


def _batch_norm(*, input: torch.Tensor, training: bool) -> Scratch:
    """Return partial statistics for channels last, nothing for plain layout.

    Source: batch_norm_stats_channels_last_cuda_template in cuda/Normalization.cuh, torch 2.13.
    """
    return Scratch.exact(_BATCH_NORM, _batch_norm_partials(input, 4) if training else ())


def _batch_norm_backward(*, input: torch.Tensor) -> Scratch:
    """Return two sums per channel, and partial sums, for channels last.

    Source: batch_norm_backward_reduce_cuda_channels_last_template in cuda/Normalization.cuh.
    """
    per_channel = int(input.shape[1]) * accumulate_width(input.dtype)
    sums = (per_channel, per_channel) if _is_channel_minor(input) else ()
    return Scratch.exact(_BATCH_NORM, (*sums, *_batch_norm_partials(input, 2)))


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


def _cudnn_batch_norm(*, input: torch.Tensor, grad_output: torch.Tensor | None = None) -> Scratch:
    """Return a copy of a gradient whose layout isn't the image's, and cuDNN's workspace.

    That is none for plain layout, a guess up to 1 MiB for channels last.

    Source: cudnn/BatchNorm.cpp, main branch.
    """
    is_plain = input.is_contiguous()
    is_last = input.dim() == 4 and not is_plain
    layout = torch.channels_last if is_last else torch.contiguous_format
    copies = copied_bytes(grad_output, memory_format=layout)
    return Scratch.between(
        _CUDNN,
        copies,
        low_bytes=sum(copies),
        high_bytes=sum(copies) + (0 if is_plain else MIB),
        certainty=Certainty.GUESS,
    )


OPERATORS: Mapping[str, Operator] = {
    "rms_norm": Operator(choice=_rms_norm),
    "native_layer_norm_backward": Operator(scratch=_layer_norm_backward),
    "_fused_rms_norm_backward": Operator(scratch=_layer_norm_backward),
    "native_group_norm": Operator(scratch=_group_norm),
    "native_group_norm_backward": Operator(scratch=_group_norm_backward),
    "native_batch_norm": Operator(scratch=_batch_norm),
    "native_batch_norm_backward": Operator(scratch=_batch_norm_backward),
    "cudnn_batch_norm": Operator(scratch=_cudnn_batch_norm),
    "cudnn_batch_norm_backward": Operator(scratch=_cudnn_batch_norm),
}
