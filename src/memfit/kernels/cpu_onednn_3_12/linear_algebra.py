"""Copies, pivots and temporaries of solvers, inverses and determinants on the CPU.

LAPACK overwrites its input, so torch hands it a copy wherever the result does not lie in its place.

Source: BatchLinearAlgebra.cpp and LinearAlgebra.cpp in aten/src/ATen/native of torch 2.13, and the
allocator's events.

Limits: a single `matrix_exp` has what matrices of a large norm take (above 1.5 in fp32, 0.3 in
fp64); smaller ones take four to nine times the matrix instead of twelve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from memfit.kernels.cpu_onednn_3_12.lapack import ARRAY, LENGTH, WORK, work_lengths
from memfit.kernels.cpu_onednn_3_12.matrices import (
    INT_BYTES,
    checked_bytes,
    num_matrices,
    order_bytes,
    packed_copy_bytes,
    transposed_block_bytes,
    triangle_bytes,
)
from memfit.kernels.registration import Operator
from memfit.kernels.tensor_bytes import num_bytes

_LONG_BYTES = 8


def _triangle(*, self: torch.Tensor) -> int:
    return triangle_bytes(self)


def _cholesky(*, self: torch.Tensor) -> int:
    return max(checked_bytes(num_matrices(self)), transposed_block_bytes(self))


def _cholesky_root(*, self: torch.Tensor, check_errors: bool = False) -> int:
    return max(triangle_bytes(self), num_matrices(self) + 1 if check_errors else 0)


def _cholesky_solve(*, self: torch.Tensor, input2: torch.Tensor, out: torch.Tensor) -> int:
    copies = num_matrices(out)
    size = copies * math.prod(input2.shape[-2:]) * input2.element_size()
    with_copy = size + max(checked_bytes(copies), transposed_block_bytes(input2))
    return max(with_copy, transposed_block_bytes(self))


def _cholesky_inverse(*, self: torch.Tensor) -> int:
    return checked_bytes(num_matrices(self))


def _inverse(*, A: torch.Tensor) -> int:  # noqa: N803 - torch's own name
    pivots = num_matrices(A) * A.shape[-1] * INT_BYTES
    return num_bytes(A) + pivots + order_bytes(A)


def _solve(*, A: torch.Tensor, B: torch.Tensor, out: tuple[Any, ...]) -> int:  # noqa: N803 - torch's own names
    """Return the bytes of checks and, for right sides that are vectors, of a copy of the result."""
    is_vector = B.dim() == 1 or (A.dim() - 1 == B.dim() and B.shape == A.shape[:-1])
    result = out[0]
    if is_vector:
        return num_bytes(result) + order_bytes(A)
    return max(order_bytes(A), _shared_bytes(num_matrices(A), num_matrices(result)))


def _solve_factored(*, LU: torch.Tensor, out: torch.Tensor) -> int:  # noqa: N803 - torch's own name
    solving = max(order_bytes(LU), _shared_bytes(num_matrices(LU), num_matrices(out)))
    if LU.mT.is_contiguous():
        return solving
    return num_bytes(LU) + max(solving, transposed_block_bytes(LU))


def _shared_bytes(num_factored: int, num_sides: int) -> int:
    """Return the bytes of finding each right side's matrix, where several share one."""
    return 0 if num_factored == num_sides else _LONG_BYTES * (num_factored + num_sides)


def _lower_upper(*, A: torch.Tensor) -> int:  # noqa: N803 - torch's own name
    """Return the bytes of both factors in one matrix, then of the order of rows."""
    copies, (num_rows, num_columns) = num_matrices(A), A.shape[-2:]
    square = min(num_rows, num_columns)
    is_cut = num_columns > square or (num_rows > square and copies > 1)
    dense = torch.empty(A.shape, dtype=A.dtype, device="meta")
    cut = triangle_bytes(dense[..., :square, :square]) if is_cut else 0
    kept = copies * (square + 1) * INT_BYTES
    return kept + max(num_bytes(A) + transposed_block_bytes(dense), cut, _permutation_bytes(A))


def _unpack(*, LU_data: torch.Tensor, unpack_pivots: bool = True) -> int:  # noqa: N803 - torch's own name
    square = min(LU_data.shape[-2:])
    cut = LU_data[..., :square, :square]
    order = _permutation_bytes(LU_data) if unpack_pivots else 0
    return max(order, triangle_bytes(cut))


def _permutation_bytes(matrix: torch.Tensor) -> int:
    """Return the bytes of the places of rows: one list for each matrix, and one to begin with."""
    copies, num_rows = num_matrices(matrix), matrix.shape[-2]
    return (copies + (copies > 1)) * num_rows * _LONG_BYTES


def _parity_bytes(matrix: torch.Tensor) -> int:
    """Return the bytes of finding out whether pivots change a determinant's sign."""
    copies, num_rows = num_matrices(matrix), matrix.shape[-1]
    moved = copies * num_rows * (1 + _LONG_BYTES) + num_rows * INT_BYTES
    return moved + copies * (_LONG_BYTES + INT_BYTES)


def _determinant(*, A: torch.Tensor) -> int:  # noqa: N803 - torch's own name
    return _parity_bytes(A) + num_matrices(A) * A.element_size()


def _log_determinant(*, A: torch.Tensor) -> int:  # noqa: N803 - torch's own name
    copies, width = num_matrices(A), A.element_size()
    signs = copies * (INT_BYTES + _LONG_BYTES + (A.shape[-1] + 2) * width)
    return max(_parity_bytes(A), signs)


def _triangular_solve(*, self: torch.Tensor, out: torch.Tensor) -> int:
    is_shared = num_matrices(self) != num_matrices(out)
    size = math.prod(self.shape[-2:]) * self.element_size()
    return num_matrices(out) * size if is_shared else packed_copy_bytes(self)


def _ldl(*, self: torch.Tensor) -> int:
    num_rows = self.shape[-1]
    numbers, _ = work_lengths(
        "sytrf",
        self.dtype,
        *("L", num_rows, ARRAY, max(1, num_rows), ARRAY, WORK, LENGTH),
        is_exact=True,
    )
    return max(numbers * self.element_size(), triangle_bytes(self))


def _matrix_exponential(*, self: torch.Tensor) -> int:
    if self.shape[-1] <= 1:
        return 0
    width, copies = self.element_size(), num_matrices(self)
    if copies == 1:
        return 12 * num_bytes(self) + 4 * width + _LONG_BYTES
    return 10 * num_bytes(self) + 3 * copies * width


def _distances(*, x1: torch.Tensor, x2: torch.Tensor, out: torch.Tensor) -> int:
    """Return the bytes of two operands with their norms beside them, for one product."""
    copies, rows = num_matrices(x1), x1.shape[-2] + x2.shape[-2]
    first = copies * x1.shape[-2] * (2 * x1.shape[-1] + 2) + 2 * copies * rows - out.numel()
    both = copies * rows * (x1.shape[-1] + 2)
    return max(both, first) * x1.element_size()


OPERATORS: Mapping[str, Operator] = {
    **dict.fromkeys(("tril", "triu"), Operator(scratch=_triangle)),
    "cholesky": Operator(scratch=_cholesky),
    "linalg_cholesky_ex": Operator(scratch=_cholesky_root),
    "cholesky_solve": Operator(scratch=_cholesky_solve),
    "cholesky_inverse": Operator(scratch=_cholesky_inverse),
    "linalg_inv_ex": Operator(scratch=_inverse),
    "_linalg_solve_ex": Operator(scratch=_solve),
    "linalg_lu": Operator(scratch=_lower_upper),
    "linalg_lu_solve": Operator(scratch=_solve_factored),
    "lu_unpack": Operator(scratch=_unpack),
    "_linalg_det": Operator(scratch=_determinant),
    "_linalg_slogdet": Operator(scratch=_log_determinant),
    "linalg_solve_triangular": Operator(scratch=_triangular_solve),
    "linalg_ldl_factor_ex": Operator(scratch=_ldl),
    "linalg_matrix_exp": Operator(scratch=_matrix_exponential),
    "_euclidean_dist": Operator(scratch=_distances),
}
