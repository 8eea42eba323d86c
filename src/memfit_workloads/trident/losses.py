"""The losses of TRIDENT-Net, each one number per sample, so that micro-batches keep their mean.

Shape suffixes: B samples, T frames, K objects of a frame, h and w the sides of the detector's maps.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from .fusion import Outcomes
from .model import Answer
from .plume_det import DetectionMaps

BRIER_WEIGHT, HIERARCHY_WEIGHT = 0.25, 0.2
SEGMENTATION_WEIGHT, REGRESSION_WEIGHT = 0.5, 0.25
_SMOOTHING = 1.0
"""Added to both sides of Dice, so that an empty mask that is found empty costs nothing."""
_LEAST_PROBABILITY = 1e-4
_SIGMAS_PER_SIDE = 6.0
"""A box is six standard deviations of its spot wide; CenterNet's own spots are about as large."""


def batch_loss(answer: Answer, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean over samples of all losses that the batch has targets for.

    Masks and boxes count for the samples that have them; those without add 0 to the sum, and count
    in the mean.
    """
    loss_B = outcome_loss(answer.outcomes, batch["event"], batch["severe"])
    if "mask" in batch:
        mask = batch["mask"]
        assert answer.mask_logits is not None, "a branch that is not run has no targets"
        assert answer.change_logits is not None, "a branch that is not run has no targets"
        change = change_loss(answer.change_logits, mask)
        segmentation = segmentation_loss(answer.mask_logits[:, :, 0], mask)
        loss_B = loss_B + batch["has_mask"] * (segmentation + SEGMENTATION_WEIGHT * change)
    if "boxes" in batch:
        assert answer.detections is not None, "a branch that is not run has no targets"
        loss_B = loss_B + batch["has_boxes"] * detection_loss(answer.detections, batch["boxes"])
    return loss_B.mean()


def outcome_loss(outcomes: Outcomes, event_B: Tensor, severe_B: Tensor) -> Tensor:
    """Cross-entropy and Brier score of both outcomes, and what the second is above the first: (B,).

    Brier scores are weighted 0.25 and the hinge 0.2. The hinge looks at what the second head says
    by itself: after the minimum of both it would be 0 always.
    """
    pairs = ((outcomes.event, event_B), (outcomes.severe, severe_B))
    loss_B = torch.zeros_like(event_B)
    for logits, target in pairs:
        cross_entropy = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        brier = (logits.float().sigmoid() - target).square()
        loss_B = loss_B + cross_entropy + BRIER_WEIGHT * brier
    severe, event = (each.float().sigmoid() for each in (outcomes.severe_alone, outcomes.event))
    return loss_B + HIERARCHY_WEIGHT * (severe - event).relu()


def segmentation_loss(logits_BTHW: Tensor, mask_BTHW: Tensor) -> Tensor:
    """Return 0.5 cross-entropy + 0.5 (1 - Dice) of each sample's mask: (B,).

    Source: Milletari et al. 2016 (arXiv 1606.04797), section 3, with plain sums for squares.
    """
    target = mask_BTHW.to(logits_BTHW.dtype)
    cross_entropy = F.binary_cross_entropy_with_logits(logits_BTHW, target, reduction="none")
    probability = logits_BTHW.sigmoid()
    overlap = (probability * target).flatten(1).sum(dim=1)
    total = (probability.flatten(1).sum(dim=1)) + target.flatten(1).sum(dim=1)
    dice = (2 * overlap + _SMOOTHING) / (total + _SMOOTHING)
    entropy_B = cross_entropy.flatten(1).mean(dim=1)
    return SEGMENTATION_WEIGHT * entropy_B + SEGMENTATION_WEIGHT * (1 - dice)


def change_loss(logits_B1hw: Tensor, mask_BTHW: Tensor) -> Tensor:
    """Cross-entropy of where the masks of frames T/4 and 3T/4 differ, on a coarse grid: (B,).

    This target is memfit's: the document gives the two-frame network a mask and no loss for it.
    """
    num_frames = mask_BTHW.shape[1]
    changed = mask_BTHW[:, num_frames // 4] != mask_BTHW[:, 3 * num_frames // 4]
    height, width = logits_B1hw.shape[2:]
    target = F.adaptive_avg_pool2d(changed[:, None].float(), (height, width))
    loss = F.binary_cross_entropy_with_logits(logits_B1hw.float(), target, reduction="none")
    return loss.flatten(1).mean(dim=1)


def detection_loss(maps: DetectionMaps, boxes_BTK5: Tensor) -> Tensor:
    """Focal loss of the heatmap, and 0.25 L1 of offset, size and intensity at the centres: (B,).

    Each is divided by the number of objects in the sample's frames, 1 where there is none.

    Args:
        maps: the detector's answer.
        boxes_BTK5: centre x and y, width and height as fractions of the frame, and intensity from
            0 to 1; a width of 0 means that there is no object.

    Source: Zhou et al. 2019 (arXiv 1904.07850), section 3 and equation 1.
    """
    height, width = maps.heatmap.shape[3:]
    scale = boxes_BTK5.new_tensor([width, height, width, height])
    placed = boxes_BTK5[..., :4] * scale
    is_there_BTK = boxes_BTK5[..., 2] > 0
    limit = boxes_BTK5.new_tensor([width - 1, height - 1])
    cell = torch.minimum(placed[..., :2].floor().clamp_min(0), limit)
    num_objects_B = is_there_BTK.flatten(1).sum(dim=1).clamp_min(1)
    spots = _spots(cell, placed[..., 2:], is_there_BTK, (height, width))
    focal_B = _focal(maps.heatmap[:, :, 0].float(), spots) / num_objects_B
    targets = {
        "offset": placed[..., :2] - cell,
        "size": placed[..., 2:],
        "intensity": boxes_BTK5[..., 4:],
    }
    index = (cell[..., 1] * width + cell[..., 0]).long()
    loss_B = focal_B
    for name, target in targets.items():
        error = (_at(getattr(maps, name).float(), index) - target).abs().sum(dim=-1)
        regression_B = (error * is_there_BTK).flatten(1).sum(dim=1) / num_objects_B
        loss_B = loss_B + REGRESSION_WEIGHT * regression_B
    return loss_B


def _spots(
    cell_BTK2: Tensor, size_BTK2: Tensor, is_there_BTK: Tensor, sides: tuple[int, int]
) -> Tensor:
    """Draw a Gaussian around every centre; the highest counts: (B, T, h, w)."""
    ys, xs = (torch.arange(side, device=cell_BTK2.device) for side in sides)
    sigma = (size_BTK2.amax(dim=-1) / _SIGMAS_PER_SIDE).clamp_min(0.5)
    factor = -0.5 / sigma.square()
    across = (factor[..., None] * (xs - cell_BTK2[..., 0:1]).square()).exp()
    down = (factor[..., None] * (ys - cell_BTK2[..., 1:2]).square()).exp()
    spot = down[..., :, None] * across[..., None, :]
    return (spot * is_there_BTK[..., None, None]).amax(dim=2)


def _focal(logits_BThw: Tensor, target_BThw: Tensor) -> Tensor:
    """Sum the penalty-reduced focal loss over a sample's frames and cells: (B,)."""
    probability = logits_BThw.sigmoid().clamp(_LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY)
    at_centre = -(1 - probability).square() * probability.log()
    elsewhere = -(1 - target_BThw).pow(4) * probability.square() * (1 - probability).log()
    return torch.where(target_BThw == 1, at_centre, elsewhere).flatten(1).sum(dim=1)


def _at(maps_BTChw: Tensor, index_BTK: Tensor) -> Tensor:
    """Read maps at cells: (B, T, K, C)."""
    num_maps = maps_BTChw.shape[2]
    index = index_BTK[:, :, None].expand(-1, -1, num_maps, -1)
    return maps_BTChw.flatten(3).gather(3, index).transpose(2, 3)
