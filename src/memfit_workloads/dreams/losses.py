"""The losses of DreaMS, by class index and a few rows at a time.

Shapes: R rows, C classes, B samples.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

FOCAL_GAMMA = 5.0
"""Source: Bushuiev et al. 2025."""


def focal_loss(logits_RC: Tensor, target_R: Tensor, gamma: float = FOCAL_GAMMA) -> Tensor:
    """Return ``(1 - p)^gamma (-log p)`` of each row's true class, (R,).

    Source: Lin et al. 2017, arXiv 1708.02002, without the class weights.
    """
    log_p = F.log_softmax(logits_RC, dim=-1).gather(-1, target_R[:, None])[:, 0]
    return (1 - log_p.exp()).clamp_min(0).pow(gamma) * -log_p


def masked_mz_losses(
    hidden_RD: Tensor, weight_CD: Tensor, bias_C: Tensor, target_R: Tensor, rows_at_once: int
) -> Tensor:
    """Return the focal loss of each masked peak, (R,), with the logits of few rows at a time.

    Logits are made again in backward, so that (R, C) never exists.
    """

    def part(hidden: Tensor, target: Tensor) -> Tensor:
        return focal_loss(F.linear(hidden, weight_CD, bias_C), target)

    if not rows_at_once or len(hidden_RD) <= rows_at_once:
        return part(hidden_RD, target_R)
    losses = [
        checkpoint(part, hidden, target, use_reentrant=False)
        for hidden, target in zip(
            hidden_RD.split(rows_at_once), target_R.split(rows_at_once), strict=True
        )
    ]
    return torch.cat(losses)


def focal_bce(logits: Tensor, target: Tensor, gamma: float) -> Tensor:
    """Return the focal binary cross-entropy of each entry; gamma 0 is the plain one."""
    losses = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    if not gamma:
        return losses
    return (1 - torch.exp(-losses)).clamp_min(0).pow(gamma) * losses


def cosine_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """Return 1 - cosine of each row, (B,)."""
    return 1 - F.cosine_similarity(predicted, target, dim=-1)


def triplet_loss(anchor: Tensor, positive: Tensor, negative: Tensor, margin: float) -> Tensor:
    """Return how far the negative comes within the margin of the positive, (B,)."""
    near = F.cosine_similarity(anchor, positive, dim=-1)
    far = F.cosine_similarity(anchor, negative, dim=-1)
    return torch.relu(far - near + margin)
