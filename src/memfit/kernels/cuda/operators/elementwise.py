"""Dropout and softmax on CUDA, and kernels over lists of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memfit.kernels.registration import Operator, Rule
from memfit.kernels.rounding import ceil_div
from memfit.kernels.scratch import Scratch
from memfit.kernels.tensor_bytes import accumulate_width, copied_bytes

_aten = torch.ops.aten
_SOFTMAX = "aten/src/ATen/native/cuda/SoftMax.cu"
_FOREACH_CHUNK = 65_536


def _dropout(*, input: torch.Tensor, p: float, train: bool) -> Any:
    """Take the fused kernel, which keeps a mask of bools.

    Source: ``is_fused_kernel_acceptable`` in aten/src/ATen/native/Dropout.cpp.
    """
    if not train or not 0 < p < 1 or not input.numel():
        return NotImplemented
    return _aten.native_dropout(input, p, train)[0]


def _softmax_choice(kernel: Any) -> Rule:
    """Take fp16 in and give fp32 without a copy, as the kernel on CUDA can.

    Source: ``softmax`` and ``log_softmax`` in aten/src/ATen/native/SoftMax.cpp.
    """

    def choice(*, self: torch.Tensor, dim: int, dtype: torch.dtype | None) -> Any:
        if self.dtype is not torch.float16 or dtype is not torch.float32:
            return NotImplemented
        return kernel(self, dim, True)

    return choice


def _softmax(*, self: torch.Tensor) -> Scratch:
    """Return a copy of an input that isn't contiguous. Source: host_softmax in cuda/SoftMax.cu."""
    return Scratch.exact(_SOFTMAX, copied_bytes(self))


def _log_softmax_backward(*, grad_output: torch.Tensor, output: torch.Tensor) -> Scratch:
    """Return copies of inputs that aren't contiguous. Source: as for the forward."""
    return Scratch.exact(_SOFTMAX, copied_bytes(grad_output, output))


def _softmax_backward(*, grad_output: torch.Tensor, output: torch.Tensor) -> Scratch:
    """Return the product of gradient and output, which the kernel starts from.

    Source: softmax_backward_cuda_out in cuda/SoftMax.cu; agrees to the byte with public readings of
    eager attention on a T4 (fitcheck, t4-phase3).
    """
    width = torch.promote_types(grad_output.dtype, output.dtype).itemsize
    blocks = (output.numel() * width, *copied_bytes(output))
    return Scratch.exact(f"{_SOFTMAX}, softmax_backward_cuda_out", blocks)


def _foreach_norm(*, self: Sequence[torch.Tensor]) -> Scratch:
    """Return one partial norm per 65,536 elements, for as many parts as the largest tensor has.

    The norms themselves are one tensor in torch and a list of views here.

    Source: foreach_tensor_norm_cuda in cuda/ForeachReduceOp.cu, main branch.
    """
    parts = max((ceil_div(tensor.numel(), _FOREACH_CHUNK) for tensor in self), default=0)
    width = accumulate_width(self[0].dtype) if self else 0
    source = "aten/src/ATen/native/cuda/ForeachReduceOp.cu"
    return Scratch.exact(source, (len(self) * parts * width,))


def _in_place() -> None:
    """Return nothing: optimizers in one kernel change their lists of tensors in place."""


OPERATORS: Mapping[str, Operator] = {
    "dropout": Operator(choice=_dropout),
    "softmax.int": Operator(choice=_softmax_choice(_aten._softmax)),
    "log_softmax.int": Operator(choice=_softmax_choice(_aten._log_softmax)),
    **dict.fromkeys(("_softmax", "_log_softmax"), Operator(scratch=_softmax)),
    "_softmax_backward_data": Operator(scratch=_softmax_backward),
    "_log_softmax_backward_data": Operator(scratch=_log_softmax_backward),
    "_foreach_norm": Operator(scratch=_foreach_norm),
    **dict.fromkeys(("_fused_sgd_", "_fused_adagrad_"), Operator(fake=_in_place)),
}
