"""The Lorentz model of hyperbolic space of curvature -c, right for any c above 0.

A point has a time coordinate first and D in space: <u, u> = -1/c with
<u, v> = u_s . v_s - u_0 v_0. Shape suffixes: N, M points, D dimensions of space.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_LEAST_EXCESS = 1e-5
"""How far arcosh stays above 1, where its slope is infinite."""
_LEAST_NORM = 1e-7


class LorentzProjection(nn.Module):
    """Put vectors onto the hyperboloid: a linear layer, then the exponential map at the origin.

    The layer has D + 1 outputs; the first is the time coordinate of a tangent vector at the origin,
    which is 0 there, and is dropped. Points have D + 1 coordinates.

    Args:
        width: D.
        curvature: c, above 0.
        max_norm: tangent vectors are not longer than this.
    """

    def __init__(self, width: int, curvature: float, max_norm: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width + 1)
        self.curvature, self.max_norm = curvature, max_norm

    def forward(self, vectors_ND: Tensor) -> Tensor:
        """Return points, (N, D + 1)."""
        tangent_ND = self.linear(vectors_ND)[:, 1:]
        return exponential_map(clip_norm(tangent_ND, self.max_norm), self.curvature)


def clip_norm(vectors_ND: Tensor, max_norm: float) -> Tensor:
    """Shorten what is longer."""
    norm_N1 = vectors_ND.norm(dim=1, keepdim=True).clamp(min=_LEAST_NORM)
    return vectors_ND * (max_norm / norm_N1).clamp(max=1.0)


def exponential_map(tangent_ND: Tensor, curvature: float) -> Tensor:
    """Follow tangent vectors at the origin to points, (N, D + 1)."""
    root = curvature**0.5
    reach_N1 = root * tangent_ND.norm(dim=1, keepdim=True).clamp(min=_LEAST_NORM)
    return torch.cat([reach_N1.cosh() / root, reach_N1.sinh() * tangent_ND / reach_N1], 1)


def inner_products(first_ND: Tensor, second_MD: Tensor) -> Tensor:
    """Return <u, v> of all pairs, (N, M)."""
    return first_ND[:, 1:] @ second_MD[:, 1:].T - first_ND[:, :1] @ second_MD[:, :1].T


def pair_distances(first_ND: Tensor, second_MD: Tensor, curvature: float) -> Tensor:
    """Return the distances of all pairs, (N, M): arcosh(-c <u, v>) / sqrt(c)."""
    excess_NM = (-curvature * inner_products(first_ND, second_MD)).clamp(min=1 + _LEAST_EXCESS)
    return excess_NM.acosh() / curvature**0.5


def violation(points_ND: Tensor, curvature: float) -> float:
    """Return by how much points leave the hyperboloid at most: |<u, u> + 1/c|."""
    norms_N = points_ND[:, 1:].square().sum(1) - points_ND[:, 0].square()
    return float((norms_N.detach() + 1 / curvature).abs().max())


def radii(points_ND: Tensor, curvature: float) -> Tensor:
    """Return the distances of points from the origin, (N,)."""
    root = curvature**0.5
    return (root * points_ND[:, 0]).clamp(min=1.0).acosh() / root
