"""Copies, pivots and work arrays of factorisations and solvers on the CPU.

LAPACK overwrites its input, so torch hands it a copy wherever the result does not lie in its place.
Work arrays are what MKL asks for; they grow with the rows of one matrix and are used again for each
of a batch.

Source: BatchLinearAlgebra.cpp, LinearAlgebra.cpp and BatchLinearAlgebraKernel.cpp in
aten/src/ATen/native of torch 2.13; blocks were read off MKL 2024.2, at 4 to 512 rows.

Limits: `linalg.eig` is not priced. Blocks of other versions of MKL, and of other libraries, differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from memfit.kernels.registration import Operator
from memfit.kernels.tensor_bytes import num_bytes

_INT = 4
_Blocks = tuple[tuple[int, int], ...]
_FACTORS: _Blocks = ((350, 49), (56, 17), (0, 1))
_PRODUCTS: _Blocks = ((450, 64), (65, 32), (32, 16), (0, 1))
_SYMMETRIC: _Blocks = ((16, 24), (0, 1))
_EIGENVALUES: _Blocks = ((16, 22), (0, 3))
_LEAST_SQUARES: _Blocks = ((350, 52), (12, 37), (0, 6))
"""From so many rows on, MKL's work array has so many numbers a row."""


def _num_matrices(matrix: torch.Tensor) -> int:
    return math.prod(matrix.shape[:-2])


def _checked_bytes(matrix: torch.Tensor) -> int:
    """Return the bytes of one number for each matrix, and of finding out whether one is not 0."""
    return (_INT + 1) * _num_matrices(matrix) + 1


def _order_bytes(matrix: torch.Tensor) -> int:
    """Return the bytes of bringing rows into the order of their pivots."""
    return _num_matrices(matrix) * matrix.shape[-1] + 3 * _INT


def _work_bytes(matrix: torch.Tensor, blocks: _Blocks) -> int:
    """Return the bytes of MKL's work array."""
    num_rows = min(matrix.shape[-2:])
    per_row = next(size for least_rows, size in blocks if num_rows >= least_rows)
    return (per_row * matrix.shape[-1] + 1) * matrix.element_size()


def _cholesky_solve(*, input2: torch.Tensor) -> int:
    return num_bytes(input2) + _checked_bytes(input2)


def _cholesky_inverse(*, self: torch.Tensor) -> int:
    return _checked_bytes(self)


def _inverse(*, A: torch.Tensor) -> int:  # noqa: N803 - torch's own name
    pivots = _num_matrices(A) * A.shape[-1] * _INT
    return num_bytes(A) + pivots + _order_bytes(A)


def _solve(*, A: torch.Tensor) -> int:  # noqa: N803 - torch's own name
    return _order_bytes(A)


def _determinant(*, A: torch.Tensor) -> int:  # noqa: N803 - torch's own name
    """Return the bytes of the diagonal's signs and of the parity of the pivots."""
    return 2 * _num_matrices(A) * A.shape[-1] * _INT


def _triangular_solve(*, B: torch.Tensor, left: bool = True) -> int:  # noqa: N803 - torch's own name
    return 0 if left else num_bytes(B)


def _eigen(*, A: torch.Tensor, compute_v: bool = True) -> int:  # noqa: N803 - torch's own name
    """Return the bytes of symmetric eigenproblems, by divide and conquer with vectors."""
    num_rows, width = A.shape[-1], A.element_size()
    infos = _num_matrices(A) * _INT
    if not compute_v:
        return num_bytes(A) + _work_bytes(A, _EIGENVALUES) + infos + _INT
    work = 2 * num_rows**2 + 6 * num_rows + 2
    return work * width + (3 + 5 * num_rows) * _INT + infos


def _singular_values(*, A: torch.Tensor) -> int:  # noqa: N803 - torch's own name
    return num_bytes(A) + _num_matrices(A) * _INT


def _qr(*, A: torch.Tensor) -> int:  # noqa: N803 - torch's own name
    factors = _num_matrices(A) * min(A.shape[-2:]) * A.element_size()
    return factors + max(_work_bytes(A, _FACTORS), _work_bytes(A, _PRODUCTS))


def _householder(*, input: torch.Tensor) -> int:
    return _work_bytes(input, _PRODUCTS)


def _geqrf(*, self: torch.Tensor) -> int:
    return _work_bytes(self, _FACTORS)


def _ldl(*, self: torch.Tensor) -> int:
    return _work_bytes(self, _SYMMETRIC)


def _least_squares(*, self: torch.Tensor) -> int:
    return num_bytes(self) + _work_bytes(self, _LEAST_SQUARES)


OPERATORS: Mapping[str, Operator] = {
    "cholesky_solve": Operator(scratch=_cholesky_solve),
    "cholesky_inverse": Operator(scratch=_cholesky_inverse),
    "linalg_inv_ex": Operator(scratch=_inverse),
    "_linalg_solve_ex": Operator(scratch=_solve),
    "_linalg_det": Operator(scratch=_determinant),
    "_linalg_slogdet": Operator(scratch=_determinant),
    "linalg_solve_triangular": Operator(scratch=_triangular_solve),
    "_linalg_eigh": Operator(scratch=_eigen),
    "_linalg_svd": Operator(scratch=_singular_values),
    "linalg_qr": Operator(scratch=_qr),
    "linalg_householder_product": Operator(scratch=_householder),
    "geqrf": Operator(scratch=_geqrf),
    "linalg_ldl_factor_ex": Operator(scratch=_ldl),
    "linalg_lstsq": Operator(scratch=_least_squares),
}
