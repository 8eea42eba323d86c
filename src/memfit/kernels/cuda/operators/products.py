"""Matrix products on CUDA: the library that runs them, and copies that it cannot do without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memfit.kernels.cuda.workspaces import Product
from memfit.kernels.registration import Operator
from memfit.kernels.scratch import Scratch
from memfit.kernels.tensor_bytes import num_bytes


def _matrix_product(
    left: str, right: str, *, bias: str | None = None, copies: bool = True
) -> Operator:
    """Register a product by the names of its factors, and of what is added to it."""

    def product(**arguments: Any) -> Product:
        factors = (arguments[left], arguments[right])
        added = arguments[bias] if bias else None
        return Product(
            operator=f"aten::{arguments['name']}",
            dtype=str(factors[0].dtype).removeprefix("torch."),
            left_shape=tuple(factors[0].shape),
            right_shape=tuple(factors[1].shape),
            bias_shape=() if added is None else tuple(added.shape),
            is_bias_contiguous=added is None or added.is_contiguous(),
            beta=float(arguments.get("beta", 1)),
        )

    def scratch(**arguments: Any) -> Scratch:
        return _copies(arguments[left], arguments[right])

    return Operator(product=product, scratch=scratch if copies else None)


def _copies(*factors: torch.Tensor) -> Scratch:
    """Return copies of matrices that cuBLAS cannot read in place, such as expanded ones.

    Workspaces of cuBLAS are kept by torch and counted elsewhere.

    Source: prepare_matrix_for_cublas in cuda/cuBlasCommonArgs.h, torch 2.13, and
    prepare_batch_matrix_for_cublas in cuda/Blas.cpp.
    """
    copies = [num_bytes(factor) for factor in factors if not _suits_cublas(factor)]
    return Scratch.exact("aten/src/ATen/native/cuda/cuBlasCommonArgs.h", copies)


def _suits_cublas(matrix: torch.Tensor) -> bool:
    """Return whether one of the last two dimensions is dense and the other long enough."""
    rows, columns = matrix.shape[-2:]
    row_stride, column_stride = matrix.stride()[-2:]
    by_columns = row_stride == 1 and column_stride >= max(1, rows)
    by_rows = column_stride == 1 and row_stride >= max(1, columns)
    return matrix.is_contiguous() or by_columns or by_rows


def _linear(*, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """Add the bias in place where torch does so when no dispatch mode is watching.

    Source: ``linear`` in aten/src/ATen/native/Linear.cpp; 2-D and contiguous inputs take ``addmm``.
    """
    if bias is None or input.dim() == 2 or input.is_contiguous():
        return NotImplemented
    return torch.matmul(input, weight.t()).add_(bias)


OPERATORS: Mapping[str, Operator] = {
    "linear": Operator(choice=_linear),
    "mm": _matrix_product("self", "mat2"),
    "bmm": _matrix_product("self", "mat2"),
    "addmm": _matrix_product("mat1", "mat2", bias="self"),
    "baddbmm": _matrix_product("batch1", "batch2", bias="self"),
    "addbmm": _matrix_product("batch1", "batch2", bias="self", copies=False),
    "_addmm_activation": _matrix_product("mat1", "mat2", bias="self", copies=False),
    "mv": _matrix_product("self", "vec", copies=False),
    "addmv": _matrix_product("mat", "vec", bias="self", copies=False),
    "dot": _matrix_product("self", "tensor", copies=False),
}
