"""Copies that the CPU's kernels make of their operands, and sums that they keep per thread.

Kernels that want their operands dense copy those that are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memfit.kernels.cpu_onednn_3_12.layouts import is_last, laid_out_as
from memfit.kernels.cpu_onednn_3_12.matrices import transposed_block_bytes
from memfit.kernels.registration import Operator
from memfit.kernels.tensor_bytes import copied_bytes, num_bytes

_FP32 = 4
_SMALL_AREA = 64 * 64


def _dense(*names: str, takes_channels_last: bool = False) -> Operator:
    """Register a kernel that wants these operands dense, or images with their channels last."""

    def scratch(**arguments: Any) -> int:
        tensors = [arguments[name] for name in names]
        if takes_channels_last:
            tensors = [tensor for tensor in tensors if not is_last(tensor)]
        return sum(copied_bytes(*tensors))

    return Operator(scratch=scratch)


def _batch_norm(*, input: torch.Tensor) -> int:
    return 2 * int(input.shape[1]) * _FP32


def _batch_norm_backward(*, grad_out: torch.Tensor, input: torch.Tensor) -> int:
    """A second gradient, where the kernel for dense images is used."""
    is_dense = grad_out.is_contiguous() and input.is_contiguous()
    if is_dense or (is_last(grad_out) and is_last(input)):
        return num_bytes(input)
    return 0


def _normalised(*, input: torch.Tensor, out: Any) -> Any:
    """Lay the first result out as the input suggests; those of volumes are left to torch.

    Source: ``suggest_memory_format_contig`` in aten/src/ATen/native/Normalization.cpp, torch 2.13.
    """
    first, *others = out
    if first is None or input.dim() == 5:
        return out
    return (laid_out_as(input, first), *others)


def _layer_norm_backward(
    *, grad_out: torch.Tensor, input: torch.Tensor, normalized_shape: Sequence[int]
) -> int:
    """Sums for weight and bias per thread."""
    sums = torch.get_num_threads() * 2 * math.prod(normalized_shape) * _FP32
    return sum(copied_bytes(grad_out, input)) + sums


def _group_norm_backward(*, grad_out: torch.Tensor) -> int:
    """Two sums for each channel of each image."""
    return 2 * math.prod(grad_out.shape[:2]) * _FP32


def _gelu_backward(*, grad_output: torch.Tensor, self: torch.Tensor) -> int:
    """A gradient that is not dense is copied twice, for oneDNN's kernel."""
    return 2 * sum(copied_bytes(grad_output)) if self.is_contiguous() else 0


def _safe_softmax(*, self: torch.Tensor, dim: int, out: torch.Tensor) -> int:
    """Masks of the scores, and of the rows, that are minus infinity."""
    rows = self.numel() // max(1, self.shape[dim])
    return self.numel() + rows + out.element_size() + sum(copied_bytes(self))


def _logsumexp(*, self: torch.Tensor, out: torch.Tensor) -> int:
    return num_bytes(self) + 2 * num_bytes(out)


def _columns(*, self: torch.Tensor) -> int:
    return num_bytes(self) + sum(copied_bytes(self))


def _dropout(*, input: torch.Tensor, p: float, train: bool | None) -> int:
    """A mask of the input's dtype, in training."""
    return num_bytes(input) if train is not False and p else 0


def _dropout_backward(*, grad_output: torch.Tensor) -> int:
    return num_bytes(grad_output)


def _upsample(*, self: torch.Tensor, out: torch.Tensor) -> int:
    """Input and output with their channels last, for small images."""
    is_copied = self.shape[1] > 1 and not is_last(self)
    if not is_copied or out.shape[-2] * out.shape[-1] > _SMALL_AREA:
        return 0
    return num_bytes(self) + num_bytes(out)


def _copy(*, self: torch.Tensor, src: torch.Tensor) -> int:
    return _turned_block_bytes(self, src)


def _clone(*, self: torch.Tensor, out: torch.Tensor) -> int:
    return _turned_block_bytes(out, self)


def _turned_block_bytes(target: torch.Tensor, source: torch.Tensor) -> int:
    """Return the bytes of the block through which a large matrix is turned."""
    is_turned = source.dim() == 2 and source.stride() == (1, source.shape[0])
    if not is_turned or target.dtype != source.dtype or target.shape != source.shape:
        return 0
    return transposed_block_bytes(target)


OPERATORS: Mapping[str, Operator] = {
    "_safe_softmax": Operator(scratch=_safe_softmax),
    **dict.fromkeys(("_to_copy", "clone"), Operator(scratch=_clone)),
    "copy_": Operator(scratch=_copy),
    "embedding": _dense("indices"),
    "embedding_dense_backward": _dense("grad_output", "indices"),
    "gelu_backward": Operator(scratch=_gelu_backward),
    "im2col": Operator(scratch=_columns),
    "logsumexp": Operator(scratch=_logsumexp),
    "native_batch_norm": Operator(scratch=_batch_norm, fake=_normalised),
    "native_batch_norm_backward": Operator(scratch=_batch_norm_backward, fake=_normalised),
    "native_dropout": Operator(scratch=_dropout),
    "native_dropout_backward": Operator(scratch=_dropout_backward),
    "native_group_norm_backward": Operator(scratch=_group_norm_backward),
    "native_layer_norm": _dense("input"),
    "native_layer_norm_backward": Operator(scratch=_layer_norm_backward),
    **dict.fromkeys(
        ("_log_softmax", "_softmax", "argmax", "argmin", "nll_loss2d_forward"), _dense("self")
    ),
    **dict.fromkeys(
        ("_log_softmax_backward_data", "_softmax_backward_data"), _dense("grad_output", "output")
    ),
    **dict.fromkeys(
        ("adaptive_avg_pool2d", "avg_pool2d", "max_pool2d_with_indices"),
        _dense("self", takes_channels_last=True),
    ),
    **dict.fromkeys(
        ("_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_nearest2d"),
        Operator(scratch=_upsample),
    ),
}
