"""Layouts of matrices and of batches of them, as torch's linear algebra on the CPU sees them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from memfit.kernels.tensor_bytes import num_bytes

INT_BYTES = 4
_TRANSPOSED_BLOCK = 60 * 60


def num_matrices(matrix: torch.Tensor) -> int:
    """Return how many matrices a batch has."""
    return math.prod(matrix.shape[:-2])


def is_packed(matrix: torch.Tensor) -> bool:
    """Return whether a routine reads a matrix where it lies: its rows or its columns are dense."""
    return matrix.is_contiguous() or matrix.mT.is_contiguous()


def checked_bytes(num_infos: int) -> int:
    """Return the bytes of one number for each matrix, and of finding out whether one is not 0."""
    return (INT_BYTES + 1) * num_infos + 1


def transposed_block_bytes(matrix: torch.Tensor) -> int:
    """Return the bytes of the block through which one large matrix is copied by columns.

    Source: ``copy_transpose_valid`` in aten/src/ATen/native/Copy.cpp.
    """
    if matrix.dim() != 2 or matrix.numel() < _TRANSPOSED_BLOCK or not matrix.is_contiguous():
        return 0
    return _TRANSPOSED_BLOCK * matrix.element_size()


def triangle_copy_bytes(shape: Sequence[int], strides: Sequence[int], width: int) -> int:
    """Return the bytes of the dense copy whose triangle ``tril`` and ``triu`` take.

    Batches are taken as they are if matrices follow one another without gaps.

    Source: ``checkTrilTriuBatchContiguous`` in aten/src/ATen/native/LinearAlgebraUtils.h.
    """
    expected = shape[-1] * shape[-2]
    for size, stride in zip(reversed(shape[:-2]), reversed(strides[:-2]), strict=True):
        if stride != expected:
            return math.prod(shape) * width
        expected *= size
    return 0


def triangle_bytes(matrix: torch.Tensor) -> int:
    """Return the bytes of the dense copy of a tensor whose triangle is taken."""
    if matrix.is_contiguous():
        return 0
    return triangle_copy_bytes(matrix.shape, matrix.stride(), matrix.element_size())


def order_bytes(matrix: torch.Tensor) -> int:
    """Return the bytes of checking the pivots of matrices before rows are brought into order."""
    return num_matrices(matrix) * matrix.shape[-1] + 3 * INT_BYTES


def packed_copy_bytes(matrix: torch.Tensor) -> int:
    """Return the bytes of a dense copy where neither rows nor columns are."""
    return 0 if is_packed(matrix) else num_bytes(matrix)
