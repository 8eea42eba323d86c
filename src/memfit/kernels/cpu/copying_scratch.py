"""Copies that the CPU's kernels make of their operands, and sums that they keep per thread.

Kernels that want their operands dense copy those that are not. The rules were read off the
allocator's events (torch 2.13.0+cpu, 2026-11-21).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

_FP32 = 4
_SMALL_AREA = 64 * 64
_Rule = Callable[[tuple[Any, ...], Any], int]


def copying_bytes(operator: str, args: tuple[Any, ...], out: Any) -> int:
    """Return the bytes that an operator takes for copies; 0 where no rule is known."""
    rule = _RULES.get(operator)
    return 0 if rule is None else rule(args, out)


def _dense(*places: int) -> _Rule:
    """Return the rule of a kernel that wants the operands at these places dense."""

    def num_bytes(args: tuple[Any, ...], _out: Any) -> int:
        return sum(_num_bytes(args[at]) for at in places if not args[at].is_contiguous())

    return num_bytes


def _dense_in_some_order(*places: int) -> _Rule:
    """Return the rule of a kernel that also takes images with their channels last."""

    def num_bytes(args: tuple[Any, ...], _out: Any) -> int:
        return sum(
            _num_bytes(args[at])
            for at in places
            if not args[at].is_contiguous() and not _is_last(args[at])
        )

    return num_bytes


def _norm_over_batch(args: tuple[Any, ...], _out: Any) -> int:
    return 2 * int(args[0].shape[1]) * _FP32


def _norm_over_batch_backward(args: tuple[Any, ...], _out: Any) -> int:
    """A second gradient, where the kernel for dense images is used."""
    gradient, image = args[:2]
    is_dense = gradient.is_contiguous() and image.is_contiguous()
    if is_dense or (_is_last(gradient) and _is_last(image)):
        return _num_bytes(image)
    return 0


def _norm_over_layer_backward(args: tuple[Any, ...], out: Any) -> int:
    """Sums for weight and bias per thread."""
    width = 1
    for extent in args[2]:
        width *= int(extent)
    return _dense(0, 1)(args, out) + torch.get_num_threads() * 2 * width * _FP32


def _norm_over_groups_backward(args: tuple[Any, ...], _out: Any) -> int:
    """Two sums for each channel of each image."""
    num_images, num_channels = args[0].shape[:2]
    return 2 * int(num_images * num_channels) * _FP32


def _gelu_backward(args: tuple[Any, ...], _out: Any) -> int:
    """A gradient that is not dense is copied twice, for oneDNN's kernel."""
    gradient, values = args[:2]
    return 2 * _num_bytes(gradient) if values.is_contiguous() > gradient.is_contiguous() else 0


def _safe_softmax(args: tuple[Any, ...], out: Any) -> int:
    """Masks of the scores, and of the rows, that are minus infinity."""
    scores = args[0]
    rows = scores.numel() // max(1, scores.shape[args[1]])
    return int(scores.numel() + rows + out.element_size()) + _dense(0)(args, out)


def _logsumexp(args: tuple[Any, ...], out: Any) -> int:
    return _num_bytes(args[0]) + 2 * _num_bytes(out)


def _whole_input(args: tuple[Any, ...], _out: Any) -> int:
    return _num_bytes(args[0])


def _dropout(args: tuple[Any, ...], _out: Any) -> int:
    """A mask of the input's dtype, in training."""
    is_drawn = len(args) < 3 or args[2] is not False
    return _num_bytes(args[0]) if is_drawn and args[1] else 0


def _upsample(args: tuple[Any, ...], out: Any) -> int:
    """Input and output with their channels last, for small images."""
    image = args[0]
    is_copied = image.shape[1] > 1 and not _is_last(image)
    if not is_copied or out.shape[-2] * out.shape[-1] > _SMALL_AREA:
        return 0
    return _num_bytes(image) + _num_bytes(out)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


_RULES: Mapping[str, _Rule] = MappingProxyType(
    {
        "_log_softmax": _dense(0),
        "_log_softmax_backward_data": _dense(0, 1),
        "_safe_softmax": _safe_softmax,
        "_softmax": _dense(0),
        "_softmax_backward_data": _dense(0, 1),
        "_upsample_nearest_exact2d": _upsample,
        "adaptive_avg_pool2d": _dense_in_some_order(0),
        "argmax": _dense(0),
        "argmin": _dense(0),
        "avg_pool2d": _dense_in_some_order(0),
        "embedding": _dense(1),
        "embedding_dense_backward": _dense(0, 1),
        "gelu_backward": _gelu_backward,
        "im2col": lambda args, out: _whole_input(args, out) + _dense(0)(args, out),
        "logsumexp": _logsumexp,
        "max_pool2d_with_indices": _dense_in_some_order(0),
        "native_batch_norm": _norm_over_batch,
        "native_batch_norm_backward": _norm_over_batch_backward,
        "native_dropout": _dropout,
        "native_dropout_backward": _whole_input,
        "native_group_norm_backward": _norm_over_groups_backward,
        "native_layer_norm": _dense(0),
        "native_layer_norm_backward": _norm_over_layer_backward,
        "nll_loss2d_forward": _dense(0),
        "upsample_bilinear2d": _upsample,
        "upsample_nearest2d": _upsample,
    }
)
