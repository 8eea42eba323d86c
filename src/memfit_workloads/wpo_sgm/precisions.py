"""From a network's outputs to Gaussian kernels: three ways to write a precision matrix.

Shape suffixes: C kernels, D dimensions, T entries of a packed triangle, R columns of a factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from memfit.losses import Kernels

from .triangles import FLOOR, diagonal_places, fill_triangles, triangle_places, triangle_size


class Precision(Protocol):
    """How the outputs of a network become precision matrices."""

    @property
    def num_outputs(self) -> int:
        """Return the network's outputs per centre."""

    def initial_bias(self) -> Tensor:
        """Return the last layer's bias at the beginning, (outputs,)."""

    def places(self) -> Tensor:
        """Get the places of packed entries, where there are any, to be kept beside the network."""

    def kernels(self, centres: Tensor, outputs: Tensor, places: Tensor) -> Kernels:
        """Make kernels from the outputs (C, outputs) for centres (C, D)."""


@dataclass(frozen=True, slots=True)
class _Triangular:
    """What precisions that are written with a packed triangle share."""

    num_dimensions: int

    @property
    def num_outputs(self) -> int:
        """Return the entries of a triangle."""
        return triangle_size(self.num_dimensions)

    def initial_bias(self) -> Tensor:
        """Return 0.1 on the diagonal, 0 elsewhere."""
        bias = torch.zeros(self.num_outputs)
        bias[diagonal_places(self.num_dimensions)] = 0.1
        return bias

    def places(self) -> Tensor:
        """Return the places of packed entries."""
        return triangle_places(self.num_dimensions)


@dataclass(frozen=True, slots=True)
class SoftplusPrecision(_Triangular):
    """``P = L L^T`` with a positive diagonal, ``L_ii = softplus(raw) + 1e-6``.

    Its determinant is read from the diagonal, so no product of matrices is needed.
    """

    def kernels(self, centres: Tensor, outputs: Tensor, places: Tensor) -> Kernels:
        """Make kernels from packed triangles."""
        factors, diagonals = fill_triangles(outputs, places, is_positive=True)
        log_determinants = 2.0 * diagonals.log().sum(1)
        return Kernels(centres, factors, torch.zeros_like(centres), log_determinants)


@dataclass(frozen=True, slots=True)
class StabilisedPrecision(_Triangular):
    """``P = L L^T + eps I``, as the document has it.

    Its determinant needs a Cholesky factorisation of P, D^3 / 3 multiplications per kernel.
    """

    stability: float

    def kernels(self, centres: Tensor, outputs: Tensor, places: Tensor) -> Kernels:
        """Make kernels from packed triangles."""
        factors, _ = fill_triangles(outputs, places, is_positive=False)
        log_determinants = log_determinant(factors, self.stability)
        return Kernels(centres, factors, torch.full_like(centres, self.stability), log_determinants)


@dataclass(frozen=True, slots=True)
class LowRankPrecision:
    """``P = V V^T + diag(s)``, with R columns and s = softplus(raw) + 1e-6: another, smaller model.

    Its determinant is one of R x R, by the matrix determinant lemma.
    """

    num_dimensions: int
    rank: int

    @property
    def num_outputs(self) -> int:
        """Return the diagonal's entries and the factor's."""
        return self.num_dimensions * (1 + self.rank)

    def initial_bias(self) -> Tensor:
        """Return a diagonal of 0.1 before softplus, and small columns that differ."""
        columns = torch.linspace(-0.1, 0.1, self.num_dimensions * self.rank)
        return torch.cat((torch.full((self.num_dimensions,), 0.1), columns))

    def places(self) -> Tensor:
        """Return nothing: the outputs are not packed."""
        return torch.empty(0, dtype=torch.int64)

    def kernels(self, centres: Tensor, outputs: Tensor, places: Tensor) -> Kernels:  # noqa: ARG002 - as the others
        """Make kernels from diagonals and columns."""
        raw, columns = outputs.split((self.num_dimensions, self.num_dimensions * self.rank), dim=1)
        diagonals = F.softplus(raw) + FLOOR
        factors = columns.reshape(-1, self.num_dimensions, self.rank)
        inner = factors.transpose(1, 2) @ (factors / diagonals[..., None])
        inner = inner + torch.eye(self.rank, dtype=inner.dtype, device=inner.device)
        log_determinants = diagonals.log().sum(1) + torch.logdet(inner)
        return Kernels(centres, factors, diagonals, log_determinants)


def blurred(kernels: Kernels, variance: float) -> Kernels:
    """Add noise of a variance v to the mixture: covariances become ``P^-1 + v I``.

    With P = F F^T + s I and w = 1 + v s, the new precision is ``G G^T + (s / w) I``, where
    ``G = F R^-T`` and ``R R^T = w (w I + v F^T F)``; its determinant is that of P by that of
    ``I + v P``. It costs a Cholesky factorisation per kernel.

    Args:
        kernels: with the same number at each place of a kernel's diagonal.
        variance: v, at least 0.

    Source: Zhang et al. 2024 (arXiv 2402.06162), whose terminal condition is followed by a heat
    flow; the formula is the Woodbury identity.
    """
    centres, factors, diagonals, log_determinants = kernels
    shift_C = diagonals[:, 0]
    widening_C = 1.0 + variance * shift_C
    num_dimensions, num_columns = factors.shape[1:]
    inner = variance * (factors.transpose(1, 2) @ factors)
    inner = inner + torch.diag_embed(widening_C[:, None].expand(-1, num_columns))
    root = torch.linalg.cholesky(widening_C[:, None, None] * inner)
    blurred_factors = torch.linalg.solve_triangular(
        root, factors.transpose(1, 2), upper=False
    ).transpose(1, 2)
    # log det(I + v P) = log det(w I + v F F^T), and the latter has D - R eigenvalues w.
    of_inner_C = 2.0 * root.diagonal(dim1=1, dim2=2).log().sum(1) - num_columns * widening_C.log()
    added_C = of_inner_C + (num_dimensions - num_columns) * widening_C.log()
    return Kernels(
        centres,
        blurred_factors,
        diagonals / widening_C[:, None],
        log_determinants - added_C,
    )


def log_determinant(factors: Tensor, stability: float) -> Tensor:
    """Return ``log det(L L^T + eps I)`` of matrices L (C, D, D), (C,)."""
    found: Tensor = _LogDeterminant.apply(factors, stability)
    return found


class _LogDeterminant(torch.autograd.Function):
    """A determinant by Cholesky factorisation, whose gradient is ``2 P^-1 L``."""

    @staticmethod
    def forward(ctx: Any, factors: Tensor, stability: float) -> Tensor:
        """Return the logarithms, (C,)."""
        products = factors @ factors.transpose(1, 2)
        products.diagonal(dim1=1, dim2=2).add_(stability)
        roots, _ = torch.linalg.cholesky_ex(products)
        ctx.save_for_backward(factors, roots)
        return 2.0 * roots.diagonal(dim1=1, dim2=2).log().sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the factors."""
        factors, roots = ctx.saved_tensors
        of_factors = torch.cholesky_solve(factors, roots)
        return of_factors.mul_(2.0 * gradient[:, None, None]), None
