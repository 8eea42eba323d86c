"""Losses on points of the whole step. Shape suffixes: B anchors, N points, K negatives."""

from __future__ import annotations

import torch
from torch import Tensor

INFO_NCE, DECOUPLED = "info_nce", "dcl"


def info_nce(positive_B: Tensor, negatives_BK: Tensor, is_negative_BK: Tensor) -> Tensor:
    """Average the negative log-probability of the positive among itself and explicit negatives.

    Args:
        positive_B: similarity to the positive.
        negatives_BK: similarities to negatives.
        is_negative_BK: False leaves one out.
    """
    logits = torch.cat([positive_B[:, None], _masked(negatives_BK, is_negative_BK)], 1)
    return _mean_of_anchors(logits.logsumexp(1) - positive_B, is_negative_BK)


def decoupled(positive_B: Tensor, negatives_BK: Tensor, is_negative_BK: Tensor) -> Tensor:
    """Average logsumexp of the negatives less the positive, which is not among them.

    Source: Yeh et al. 2022, https://arxiv.org/abs/2110.06848.
    """
    apart = _masked(negatives_BK, is_negative_BK).logsumexp(1)
    return _mean_of_anchors(apart - positive_B, is_negative_BK)


def _masked(negatives_BK: Tensor, is_negative_BK: Tensor) -> Tensor:
    """Set what is no negative to minus infinity; an anchor without any keeps finite numbers."""
    has_any_B1 = is_negative_BK.any(1, keepdim=True)
    return negatives_BK.masked_fill(~is_negative_BK & has_any_B1, -torch.inf)


def _mean_of_anchors(loss_B: Tensor, is_negative_BK: Tensor) -> Tensor:
    """Average over the anchors that have a negative."""
    counts_B = is_negative_BK.any(1)
    return torch.where(counts_B, loss_B, 0.0).sum() / counts_B.sum().clamp(min=1)


def hierarchy_loss(distances_NN: Tensor, tree_NN: Tensor) -> Tensor:
    """Average the squared difference of distances, each divided by its mean, over true pairs.

    Points of one code, whose tree distance is 0, are no pair.
    """
    weight_NN = (tree_NN > 0).to(distances_NN.dtype)
    num_pairs = weight_NN.sum().clamp(min=1)
    here = distances_NN / ((distances_NN * weight_NN).sum() / num_pairs)
    there = tree_NN / (tree_NN.sum() / num_pairs)
    return ((here - there).square() * weight_NN).sum() / num_pairs
