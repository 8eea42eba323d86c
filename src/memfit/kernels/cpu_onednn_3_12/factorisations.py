"""Copies and work arrays of eigenvalues, singular values, QR and least squares on the CPU.

Work arrays grow with the rows of one matrix and are used again for each of a batch.

Source: BatchLinearAlgebra.cpp and BatchLinearAlgebraKernel.cpp in aten/src/ATen/native of torch
2.13, and the allocator's events.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from memfit.kernels.cpu_onednn_3_12.lapack import (
    ARRAY,
    INTEGERS,
    LENGTH,
    WORK,
    Argument,
    work_bytes,
    work_lengths,
)
from memfit.kernels.cpu_onednn_3_12.matrices import (
    INT_BYTES,
    checked_bytes,
    num_matrices,
    transposed_block_bytes,
    triangle_copy_bytes,
)
from memfit.kernels.registration import Operator
from memfit.kernels.tensor_bytes import copied_bytes, num_bytes

_LONG_BYTES = 8


def _symmetric(*, A: torch.Tensor, compute_v: bool = True) -> int:  # noqa: N803 - torch's own name
    """Return the bytes of symmetric eigenproblems, by divide and conquer with vectors."""
    num_rows, width = A.shape[-1], A.element_size()
    job = "V" if compute_v else "N"
    numbers, integers = work_lengths(
        "syevd",
        A.dtype,
        *(job, "L", num_rows, ARRAY, max(1, num_rows), ARRAY),
        *(WORK, LENGTH, INTEGERS, LENGTH),
    )
    infos = num_matrices(A) * INT_BYTES
    work = numbers * width + integers * INT_BYTES
    if compute_v:
        return infos + work
    return num_bytes(A) + max(infos + work, transposed_block_bytes(A))


def _eigen(*, self: torch.Tensor) -> int:
    return _eigen_bytes(self, "V")


def _eigenvalues(*, self: torch.Tensor) -> int:
    return _eigen_bytes(self, "N")


def _eigen_bytes(matrix: torch.Tensor, job: str) -> int:
    """Return the bytes of general eigenproblems: results are real first, then complex."""
    num_rows, width = matrix.shape[-1], matrix.element_size()
    rows = max(1, num_rows)
    work = work_bytes(
        "geev",
        matrix.dtype,
        *("N", job, num_rows, ARRAY, rows, ARRAY, ARRAY, ARRAY, 1, ARRAY),
        *(rows if job == "V" else 1, WORK, LENGTH),
    )
    copies = num_matrices(matrix)
    results = copies * 2 * num_rows * width + (num_bytes(matrix) if job == "V" else 0)
    return copies * INT_BYTES + results + num_bytes(matrix) + work


def _singular_values(*, A: torch.Tensor) -> int:  # noqa: N803 - torch's own name
    return num_bytes(A) + num_matrices(A) * INT_BYTES + transposed_block_bytes(A)


def _pseudo_inverse(*, self: torch.Tensor, hermitian: bool = False) -> int:
    """Return the bytes of the factors, and the most of finding them and of putting them together.

    The result is there in the second step only.
    """
    copies, width = num_matrices(self), self.element_size()
    num_rows, num_columns = self.shape[-2:]
    num_values = min(num_rows, num_columns)
    values, right = copies * num_values * width, copies * num_values * num_columns * width
    scalars = 2 * _LONG_BYTES
    if hermitian:
        factors, values_again = right, values + copies * width
        finding = values + _symmetric(A=self)
    else:
        factors, values_again = right + copies * num_rows * num_values * width, 0
        finding = values + _singular_values(A=self)
    joining = 2 * values + values_again + copies * _LONG_BYTES + right
    return scalars + factors + max(finding - num_bytes(self), joining)


def _factor_bytes(matrix: torch.Tensor) -> int:
    """Return the bytes of the work array that Householder reflections are found with."""
    num_rows, num_columns = matrix.shape[-2:]
    lengths = (num_rows, num_columns, ARRAY, max(1, num_rows), ARRAY)
    least = num_columns * matrix.element_size()
    return max(least, work_bytes("geqrf", matrix.dtype, *lengths, WORK, LENGTH))


def _product_bytes(num_rows: int, num_columns: int, num_factors: int, dtype: torch.dtype) -> int:
    """Return the bytes of the work array that reflections are multiplied out with."""
    if not num_rows * num_columns:
        return 0
    lengths = (num_rows, num_columns, num_factors, ARRAY, max(1, num_rows), ARRAY)
    return work_bytes("orgqr", dtype, *lengths, WORK, LENGTH)


def _qr(*, A: torch.Tensor, mode: str = "reduced") -> int:  # noqa: N803 - torch's own name
    """Return the bytes of the reflections' factors, and the most of three steps."""
    (num_rows, num_columns), width = A.shape[-2:], A.element_size()
    num_factors = min(num_rows, num_columns)
    is_cut = mode != "complete" and num_rows > num_columns
    strides = (*_batch_strides(A), 1, num_rows)
    shape = (*A.shape[:-2], num_factors, num_columns)
    steps = [_factor_bytes(A), triangle_copy_bytes(shape, strides, width) if is_cut else 0]
    if mode != "r":
        wide = num_rows if mode == "complete" else num_factors
        steps.append(_product_bytes(num_rows, wide, num_factors, A.dtype))
    factors = num_matrices(A) * num_factors * width
    overwritten = num_bytes(A) if mode == "r" and is_cut else 0
    if overwritten:
        steps.append(transposed_block_bytes(A))
    return factors + overwritten + max(steps)


def _fake_least_squares(
    *,
    self: torch.Tensor,
    b: torch.Tensor,
    driver: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """Make results as of matrices whose rows and columns depend on nothing but each other."""
    batch, (num_rows, num_columns) = self.shape[:-2], self.shape[-2:]
    is_vector = b.dim() == self.dim() - 1
    sides = b.unsqueeze(-1) if is_vector else b
    num_sides, tallest = sides.shape[-1], max(num_rows, num_columns)
    solution = self.new_empty((*batch, num_sides, tallest)).mT[..., :num_columns, :]
    driver = driver or "gelsy"
    has_residuals = num_rows > num_columns and driver != "gelsy"
    residuals = self.new_empty((*batch, num_sides) if has_residuals else (0,))
    has_rank, has_values = driver != "gels", driver in {"gelsd", "gelss"}
    rank = self.new_empty(batch if has_rank else (0,), dtype=torch.int64)
    values = self.new_empty((*batch, min(num_rows, num_columns)) if has_values else (0,))
    return solution.squeeze(-1) if is_vector else solution, residuals, rank, values


def _batch_strides(matrix: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a dense batch of matrices of this shape."""
    strides, step = [], matrix.shape[-2] * matrix.shape[-1]
    for size in reversed(matrix.shape[:-2]):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _householder(*, input: torch.Tensor, tau: torch.Tensor) -> int:
    num_rows, num_columns = input.shape[-2:]
    work = _product_bytes(num_rows, num_columns, tau.shape[-1], input.dtype)
    return sum(copied_bytes(tau)) + work


def _geqrf(*, self: torch.Tensor) -> int:
    return _factor_bytes(self)


def _multiply(
    *, self: torch.Tensor, input2: torch.Tensor, input3: torch.Tensor, left: bool, transpose: bool
) -> int:
    """Return the bytes of multiplying with reflections that are not multiplied out."""
    num_rows, num_columns = input3.shape[-2:]
    sides = ("L" if left else "R", "T" if transpose else "N", num_rows, num_columns)
    lengths = (input2.shape[-1], ARRAY, max(1, num_rows if left else num_columns), ARRAY)
    numbers, _ = work_lengths(
        "ormqr",
        self.dtype,
        *(*sides, *lengths, ARRAY, max(1, num_rows), WORK, LENGTH),
        is_exact=True,
    )
    reflections = 0 if self.mT.is_contiguous() else num_bytes(self)
    return reflections + sum(copied_bytes(input2)) + numbers * self.element_size()


def _least_squares(
    *,
    self: torch.Tensor,
    b: torch.Tensor,
    out: tuple[torch.Tensor, ...],
    driver: str | None = None,
) -> int:
    """Return the bytes of infos, of a copy, of work arrays, and of finding each right side.

    Residuals are made after all that is given back.
    """
    copies, (num_rows, num_columns) = num_matrices(self), self.shape[-2:]
    is_vector = b.dim() == self.dim() - 1
    num_sides = 1 if is_vector else b.shape[-1]
    kept = copies * INT_BYTES + num_bytes(self)
    work = _least_squares_work(driver or "gelsy", num_rows, num_columns, num_sides, self.dtype)
    most = kept + work + 2 * copies * _LONG_BYTES - num_bytes(out[1])
    return max(most, checked_bytes(copies))


def _least_squares_work(
    driver: str, num_rows: int, num_columns: int, num_sides: int, dtype: torch.dtype
) -> int:
    rows = max(1, num_rows)
    sides: tuple[Argument, ...] = (num_rows, num_columns, num_sides)
    sides = (*sides, ARRAY, rows, ARRAY, max(rows, num_columns))
    tail: tuple[Argument, ...] = (ARRAY, ARRAY, ARRAY, WORK, LENGTH)
    if driver == "gels":
        sides, tail = ("N", *sides), (WORK, LENGTH)
    if driver == "gelsd":
        tail = (*tail, INTEGERS)
    numbers, integers = work_lengths(driver, dtype, *sides, *tail)
    extra = max(1, num_columns) if driver == "gelsy" else integers if driver == "gelsd" else 0
    return numbers * dtype.itemsize + extra * INT_BYTES


OPERATORS: Mapping[str, Operator] = {
    "_linalg_eigh": Operator(scratch=_symmetric),
    "linalg_eig": Operator(scratch=_eigen),
    **dict.fromkeys(("linalg_eigvals", "_linalg_eigvals"), Operator(scratch=_eigenvalues)),
    "_linalg_svd": Operator(scratch=_singular_values),
    "linalg_pinv": Operator(scratch=_pseudo_inverse),
    "linalg_qr": Operator(scratch=_qr),
    "linalg_householder_product": Operator(scratch=_householder),
    "geqrf": Operator(scratch=_geqrf),
    "ormqr": Operator(scratch=_multiply),
    "linalg_lstsq": Operator(scratch=_least_squares, fake=_fake_least_squares),
}
