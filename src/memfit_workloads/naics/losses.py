"""Losses on points of the whole step, from sums over parts of its pairs.

Shape suffixes: B anchors, K negatives, L codes of an anchor's list, N and M points.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .tree import OTHER_SECTOR

INFO_NCE, DECOUPLED = "info_nce", "dcl"
_LEAST_IDEAL = 1e-9


def info_nce(positive_B: Tensor, negatives_BK: Tensor, is_negative_BK: Tensor) -> Tensor:
    """Return the negative log-probability of each positive among itself and its negatives, (B,).

    Args:
        positive_B: similarity to the positive.
        negatives_BK: similarities to negatives.
        is_negative_BK: False leaves one out; an anchor without any has no loss.
    """
    logits = torch.cat([positive_B[:, None], _masked(negatives_BK, is_negative_BK)], 1)
    return _of_anchors(logits.logsumexp(1) - positive_B, is_negative_BK)


def decoupled(positive_B: Tensor, negatives_BK: Tensor, is_negative_BK: Tensor) -> Tensor:
    """Return logsumexp of the negatives less the positive, which is not among them, (B,).

    Source: Yeh et al. 2022, https://arxiv.org/abs/2110.06848.
    """
    apart = _masked(negatives_BK, is_negative_BK).logsumexp(1)
    return _of_anchors(apart - positive_B, is_negative_BK)


def _masked(negatives_BK: Tensor, is_negative_BK: Tensor) -> Tensor:
    """Set what is no negative to minus infinity; an anchor without any keeps finite numbers."""
    has_any_B1 = is_negative_BK.any(1, keepdim=True)
    return negatives_BK.masked_fill(~is_negative_BK & has_any_B1, -torch.inf)


def _of_anchors(loss_B: Tensor, is_negative_BK: Tensor) -> Tensor:
    return torch.where(is_negative_BK.any(1), loss_B, 0.0)


def lambda_rank(distances_BL: Tensor, tree_BL: Tensor, is_there_BL: Tensor) -> Tensor:
    """Return what pairs in the wrong order cost in the list of each anchor, (B,), L codes long.

    A pair costs ``softplus`` of how much farther the nearer relative lies, times what the NDCG of
    the list changes if the two change places.

    Source: Burges 2010, https://www.microsoft.com/en-us/research/publication/from-ranknet-to-lambdarank-to-lambdamart-an-overview/.

    Args:
        distances_BL: from the anchor, divided by a temperature.
        tree_BL: distances in the tree.
        is_there_BL: False leaves a code out.
    """
    gains_BL = torch.where(is_there_BL, 1 - tree_BL / OTHER_SECTOR, 0.0)
    places_L = torch.arange(2, 2 + gains_BL.shape[1]).to(gains_BL)
    discounts_L = places_L.log2().reciprocal()
    order_BL = distances_BL.detach().masked_fill(~is_there_BL, torch.inf).argsort(1)
    discounts_BL = discounts_L[order_BL.argsort(1)]
    ideal_B = (gains_BL.sort(1, descending=True).values * discounts_L).sum(1)
    weights_BLL = (gains_BL[:, :, None] - gains_BL[:, None, :]).clamp(min=0)
    weights_BLL = weights_BLL * (discounts_BL[:, :, None] - discounts_BL[:, None, :]).abs()
    weights_BLL = weights_BLL * (is_there_BL[:, :, None] & is_there_BL[:, None, :])
    costs_BLL = F.softplus(distances_BL[:, :, None] - distances_BL[:, None, :])
    return (weights_BLL * costs_BLL).sum((1, 2)) / ideal_B.clamp(min=_LEAST_IDEAL)


class PairSums(NamedTuple):
    """Sums over pairs; those of parts of the pairs add up to those of all."""

    pairs: Tensor
    here: Tensor
    here_squared: Tensor
    products: Tensor
    there: Tensor
    there_squared: Tensor

    @classmethod
    def of(cls, distances_NM: Tensor, tree_NM: Tensor) -> PairSums:
        """Sum over pairs of different codes, whose tree distance is above 0."""
        here_NM = distances_NM * (tree_NM > 0)
        return cls(
            pairs=(tree_NM > 0).to(distances_NM.dtype).sum(),
            here=here_NM.sum(),
            here_squared=here_NM.square().sum(),
            products=(here_NM * tree_NM).sum(),
            there=tree_NM.sum(),
            there_squared=tree_NM.square().sum(),
        )

    def hierarchy_loss(self) -> Tensor:
        """Return the mean squared difference of distances, each divided by its mean."""
        here, there = self.here / self.pairs, self.there / self.pairs
        return (
            self.here_squared / here.square()
            - 2 * self.products / (here * there)
            + self.there_squared / there.square()
        ) / self.pairs


def summed(terms: Callable[[int, int], tuple[Tensor, ...]], num: int, chunk: int) -> list[Tensor]:
    """Add up terms of rows, a chunk at a time; backward computes each chunk again.

    Args:
        terms: of the rows from one number to another.
        num: of rows.
        chunk: rows at a time; all at once keep what backward needs.
    """
    if chunk >= num:
        return list(terms(0, num))
    parts = [
        checkpoint(terms, start, min(start + chunk, num), use_reentrant=False)
        for start in range(0, num, chunk)
    ]
    return [torch.stack(column).sum() for column in zip(*parts, strict=True)]
