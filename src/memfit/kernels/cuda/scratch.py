"""Memory that CUDA kernels take and give back inside one operator, which dispatch does not see.

One rule per operator, each read off torch's source, for the peak inside the operator on top of its
inputs and outputs. Nothing here was measured on a GPU. Where a size is decided inside cuDNN or
cub the rule says so, with an interval.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from memfit.kernels.base import Scratch
from memfit.kernels.cuda.answers import (
    accumulate_width,
    between,
    ceil_div,
    copied_bytes,
    num_bytes,
    sure,
)
from memfit.kernels.cuda.card import Card
from memfit.kernels.cuda.convolutions import convolution_backward, convolution_forward
from memfit.kernels.cuda.cudnn_recurrence import (
    Recurrence,
    rnn_backward,
    rnn_forward,
    rnn_reserve,
    rnn_reserve_bytes,
)
from memfit.kernels.cuda.norms import (
    batch_norm_backward,
    batch_norm_forward,
    cudnn_batch_norm,
    cudnn_batch_norm_backward,
    group_norm_backward,
    group_norm_forward,
    layer_norm_backward,
    rms_norm_backward,
)
from memfit.kernels.cuda.reductions import norm_reduction, reduction
from memfit.kernels.cuda.sorting import (
    embedding_backward,
    index_put,
    multinomial,
    nonzero,
    random_permutation,
    scan,
    sort,
    topk,
    unique,
)
from memfit.units import KIB

__all__ = [
    "Card",
    "Recurrence",
    "Scratch",
    "cuda_scratch",
    "rnn_reserve",
    "rnn_reserve_bytes",
]

_FOREACH_CHUNK = 65_536


def cuda_scratch(
    operator: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, card: Card
) -> Scratch | None:
    """Return the memory that a CUDA kernel takes besides inputs and outputs; None without a rule.

    An operator that is known to take nothing gives a ``Scratch`` without blocks. An in-place
    operator (``index_put_``) has the rule of its plain form.

    Args:
        operator: the ATen name without namespace and overload, such as ``convolution_backward``.
        args: its positional arguments, tensors with their shapes, strides and dtypes.
        kwargs: its keyword arguments.
        out: what it returned.
        card: the card it would run on.
    """
    rule = _RULES.get(operator) or _RULES.get(operator.removesuffix("_"))
    return None if rule is None else rule(args, kwargs, out, card)


def _softmax(args: tuple[Any, ...], _kwargs: Mapping[str, Any], _out: Any, _card: Card) -> Scratch:
    """Return copies of inputs that aren't contiguous. Source: host_softmax in cuda/SoftMax.cu."""
    tensors = [arg for arg in args[:2] if isinstance(arg, torch.Tensor)]
    return sure("aten/src/ATen/native/cuda/SoftMax.cu", copied_bytes(*tensors))


def _softmax_backward(
    args: tuple[Any, ...], _kwargs: Mapping[str, Any], _out: Any, _card: Card
) -> Scratch:
    """Return the product of gradient and output, which the kernel starts from.

    Source: softmax_backward_cuda_out in cuda/SoftMax.cu; agrees to the byte with public readings of
    eager attention on a T4 (fitcheck, t4-phase3).
    """
    grad, output = args[0], args[1]
    width = torch.promote_types(grad.dtype, output.dtype).itemsize
    blocks = (output.numel() * width, *copied_bytes(output))
    return sure("aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out", blocks)


def _product(args: tuple[Any, ...], _kwargs: Mapping[str, Any], _out: Any, _card: Card) -> Scratch:
    """Return copies of matrices that cuBLAS cannot read in place, such as expanded ones.

    The last two tensors are multiplied; workspaces of cuBLAS are kept by torch and counted
    elsewhere.

    Source: prepare_matrix_for_cublas in cuda/cuBlasCommonArgs.h, torch 2.13, and
    prepare_batch_matrix_for_cublas in cuda/Blas.cpp.
    """
    factors = [arg for arg in args if isinstance(arg, torch.Tensor)][-2:]
    copies = [num_bytes(factor) for factor in factors if not _suits_cublas(factor)]
    return sure("aten/src/ATen/native/cuda/cuBlasCommonArgs.h", copies)


def _suits_cublas(matrix: torch.Tensor) -> bool:
    """Return whether one of the last two dimensions is dense and the other long enough."""
    rows, columns = matrix.shape[-2:]
    row_stride, column_stride = matrix.stride()[-2:]
    by_columns = row_stride == 1 and column_stride >= max(1, rows)
    by_rows = column_stride == 1 and row_stride >= max(1, columns)
    return matrix.is_contiguous() or by_columns or by_rows


def _foreach_norm(
    args: tuple[Any, ...], _kwargs: Mapping[str, Any], _out: Any, _card: Card
) -> Scratch:
    """Return one partial norm per 65,536 elements, for as many parts as the largest tensor has.

    The norms themselves are one tensor in torch and a list of views here.

    Source: foreach_tensor_norm_cuda in cuda/ForeachReduceOp.cu, main branch.
    """
    tensors = args[0]
    parts = max((ceil_div(t.numel(), _FOREACH_CHUNK) for t in tensors), default=0)
    width = accumulate_width(tensors[0].dtype) if tensors else 0
    source = "aten/src/ATen/native/cuda/ForeachReduceOp.cu"
    return sure(source, (len(tensors) * parts * width,))


def _counts(args: tuple[Any, ...], _kwargs: Mapping[str, Any], _out: Any, _card: Card) -> Scratch:
    """Return the least and the largest value, and room for finding them, before values are counted.

    Source: cuda/SummaryOps.cu, main branch.
    """
    return between(
        "aten/src/ATen/native/cuda/SummaryOps.cu",
        (args[0].element_size(), args[0].element_size()),
        low_bytes=0,
        high_bytes=64 * KIB,
    )


def _nothing(_args: tuple[Any, ...], _kwargs: Mapping[str, Any], _out: Any, _card: Card) -> Scratch:
    """Return nothing: the kernels work from inputs to outputs."""
    return sure("aten/src/ATen/native/cuda")


_Rule = Callable[[tuple[Any, ...], Mapping[str, Any], Any, Card], Scratch | None]
_RULES: Mapping[str, _Rule] = MappingProxyType(
    {
        **dict.fromkeys(("sum", "mean", "prod", "amax", "amin"), reduction),
        **dict.fromkeys(("linalg_vector_norm", "norm"), norm_reduction),
        **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _product),
        **dict.fromkeys(("index_put", "_index_put_impl"), index_put),
        **dict.fromkeys(("bincount", "histc"), _counts),
        **dict.fromkeys(("cumsum", "cumprod"), scan),
        **dict.fromkeys(("unique", "_unique", "_unique2"), unique),
        **dict.fromkeys(
            ("_softmax", "_log_softmax", "_log_softmax_backward_data"),
            _softmax,
        ),
        **dict.fromkeys(
            (
                "cat",
                "embedding",
                "gather",
                "index_add",
                "index_select",
                "nll_loss2d_backward",
                "nll_loss2d_forward",
                "nll_loss_backward",
                "nll_loss_forward",
                "scatter_add",
            ),
            _nothing,
        ),
        "_softmax_backward_data": _softmax_backward,
        "_cudnn_rnn": rnn_forward,
        "_cudnn_rnn_backward": rnn_backward,
        "_foreach_norm": _foreach_norm,
        "_fused_rms_norm_backward": rms_norm_backward,
        "convolution": convolution_forward,
        "convolution_backward": convolution_backward,
        "cudnn_batch_norm": cudnn_batch_norm,
        "cudnn_batch_norm_backward": cudnn_batch_norm_backward,
        "embedding_dense_backward": embedding_backward,
        "multinomial": multinomial,
        "native_batch_norm": batch_norm_forward,
        "native_batch_norm_backward": batch_norm_backward,
        "native_group_norm": group_norm_forward,
        "native_group_norm_backward": group_norm_backward,
        "native_layer_norm_backward": layer_norm_backward,
        "nonzero": nonzero,
        "randperm": random_permutation,
        "sort": sort,
        "topk": topk,
    }
)
