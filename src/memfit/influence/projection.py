"""Projects per-sample gradients from both sides to a few numbers: an approximation, by name.

A gradient ``G`` (R, C) becomes ``P G Q^T`` with random P (K, R) and Q (K, C), whose entries are
normal with variance 1 / K. Inner products keep their expectation; their standard deviation is about
``sqrt(2) / K`` of the product of the two norms. Where R or C is at most K, that side stays whole.

Source: LoGra, Choe et al. 2024 (arXiv 2405.13954), section 3, with random projections.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .factors import Factor, Lookup, Outer
from .gradients import SampleGradients
from .products import block_bounds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProjectedGradients:
    """Per-sample gradients as a few numbers each."""

    features: Tensor
    """(B, F)."""

    @property
    def num_samples(self) -> int:
        """Return B."""
        return len(self.features)

    def inner_products(self, other: ProjectedGradients, limit_bytes: int) -> Tensor:  # noqa: ARG002 - as SampleGradients has it
        """Return the inner products of all pairs, (B, B')."""
        return self.features @ other.features.t()

    def squared_norms(self, limit_bytes: int) -> Tensor:  # noqa: ARG002 - as above
        """Return each sample's inner product with itself, (B,)."""
        return self.features.square().sum(dim=1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projection:
    """Random matrices for both sides of each parameter, drawn once."""

    dimension: int
    """K."""
    seed: int = 0
    _drawn: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def of(self, gradients: SampleGradients) -> ProjectedGradients:
        """Project the gradients of B samples."""
        parts = []
        for name, factors in gradients.factors.items():
            made = [self._projected(name, factor).flatten(1) for factor in factors]
            parts.append(torch.stack(made).sum(dim=0) if len(made) > 1 else made[0])
        return ProjectedGradients(features=torch.cat(parts, dim=1))

    def _projected(self, name: str, factor: Factor) -> Tensor:
        """Project the gradients of one use of a parameter: (B, K, K)."""
        match factor:
            case Outer():
                left = self._projected_left(name, factor)
                if factor.right is None:
                    return left.sum(dim=1)[:, :, None]
                right = self._side(f"{name} columns", factor.num_columns, factor.right)
                right_BTK = factor.right if right is None else factor.right @ right
                return torch.bmm(left.mT, right_BTK)
            case Lookup():
                right = self._side(f"{name} columns", factor.num_columns, factor.values)
                values_BTK = factor.values if right is None else factor.values @ right
                rows = self._side(f"{name} rows", factor.num_rows, factor.values)
                if rows is None:
                    kept = Lookup(
                        indices=factor.indices, values=values_BTK, num_rows=factor.num_rows
                    )
                    return kept.block(0, factor.num_rows)
                return torch.bmm(rows[factor.indices].mT, values_BTK)
        value = factor.value
        rows = self._side(f"{name} rows", factor.num_rows, value)
        value = value if rows is None else torch.matmul(rows.t(), value)
        right = self._side(f"{name} columns", factor.num_columns, value)
        return value if right is None else value @ right

    def _projected_left(self, name: str, factor: Outer) -> Tensor:
        """Project the left factor, a piece at a time: (B, T, K)."""
        like = factor.left_block(0, 1)
        rows = self._side(f"{name} rows", factor.num_rows, like)
        if rows is None:
            return factor.left_block(0, factor.num_rows)
        if isinstance(factor.left, Tensor):
            return factor.left @ rows
        made = like.new_zeros((factor.num_samples, 1, rows.shape[1]))
        for start, stop in block_bounds(factor.num_rows, 4096):
            made += factor.left_block(start, stop) @ rows[start:stop]
        return made

    def _side(self, name: str, number: int, like: Tensor) -> Tensor | None:
        """Return the matrix (number, K) of one side; None where it stays whole."""
        if number <= self.dimension:
            return None
        key = (name, number)
        if key not in self._drawn:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + self.seed)
            shape = (number, self.dimension)
            drawn = torch.randn(shape, generator=generator, dtype=torch.float32)
            drawn = drawn.div_(self.dimension**0.5)
            self._drawn[key] = drawn.to(device=like.device, dtype=like.dtype)
        return self._drawn[key]
