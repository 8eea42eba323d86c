"""Lower triangular matrices, packed row by row: entry (i, j) lies at ``i (i + 1) / 2 + j``.

Shape suffixes: C matrices, D rows and columns, T entries of a triangle, D (D + 1) / 2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FLOOR = 1e-6
"""The least entry of a positive diagonal; keeps its logarithm finite."""


def triangle_size(num_dimensions: int) -> int:
    """Return the entries of one triangle."""
    return num_dimensions * (num_dimensions + 1) // 2


def diagonal_places(num_dimensions: int, device: torch.device | None = None) -> Tensor:
    """Return where the diagonal lies in a packed triangle, (D,) int64: ``i (i + 3) / 2``."""
    rows = torch.arange(num_dimensions, device=device)
    return rows * (rows + 3) // 2


def triangle_places(num_dimensions: int, device: torch.device | None = None) -> Tensor:
    """Return where packed entries lie in a square matrix that is laid out flat, (T,) int64."""
    rows, columns = torch.tril_indices(num_dimensions, num_dimensions, device=device)
    return rows.mul_(num_dimensions).add_(columns)


def fill_triangles(packed: Tensor, places: Tensor, *, is_positive: bool) -> tuple[Tensor, Tensor]:
    """Unpack lower triangular matrices.

    Args:
        packed: (C, T).
        places: what `triangle_places` gives.
        is_positive: make the diagonal softplus(packed) + 1e-6.

    Returns:
        The matrices (C, D, D), and their diagonals (C, D), both part of the graph: the diagonal's
        gradient needs no matrix of its own.
    """
    filled: tuple[Tensor, Tensor] = _FilledTriangles.apply(packed, places, is_positive)
    return filled


class _FilledTriangles(torch.autograd.Function):
    """Write packed entries to their places; in backward, read them from there."""

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, places: Tensor, is_positive: bool
    ) -> tuple[Tensor, Tensor]:
        """Return matrices (C, D, D) and diagonals (C, D)."""
        num_dimensions = round((2 * packed.shape[1] + 0.25) ** 0.5 - 0.5)
        matrices = packed.new_zeros((len(packed), num_dimensions, num_dimensions))
        # Not by brackets, which take another way for a single matrix.
        torch.ops.aten.index_put_(matrices.flatten(1), [None, places], packed)
        diagonal = matrices.diagonal(dim1=1, dim2=2)
        raw = diagonal.clone()
        if is_positive:
            diagonal.copy_(F.softplus(raw).add_(FLOOR))
        ctx.is_positive = is_positive
        ctx.save_for_backward(places, raw)
        return matrices, diagonal.clone()

    @staticmethod
    def backward(ctx: Any, of_matrices: Tensor, of_diagonals: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the packed entries."""
        places, raw = ctx.saved_tensors
        of_packed = of_matrices.flatten(1)[:, places]
        on_diagonal = diagonal_places(raw.shape[1], raw.device)
        of_raw = of_matrices.diagonal(dim1=1, dim2=2) + of_diagonals
        if ctx.is_positive:
            of_raw = of_raw * torch.sigmoid(raw)
        torch.ops.aten.index_put_(of_packed, [None, on_diagonal], of_raw)
        return of_packed, None, None
