"""The losses are what their formulas say, sample by sample."""

from __future__ import annotations

import math

import pytest
import torch

from memfit_workloads.trident.clips import blank_batch, collate
from memfit_workloads.trident.fusion import Outcomes
from memfit_workloads.trident.generated import GeneratedClips
from memfit_workloads.trident.losses import (
    batch_loss,
    change_loss,
    detection_loss,
    outcome_loss,
    segmentation_loss,
)
from memfit_workloads.trident.model import build_model
from memfit_workloads.trident.plume_det import DetectionMaps
from memfit_workloads.trident.sizes import DEMO


def entropy(p: float, y: float) -> float:
    return -(y * math.log(p) + (1 - y) * math.log(1 - p))


@pytest.mark.parametrize(
    ("p1", "p2", "y1", "y2"), [(0.7, 0.2, 1, 0), (0.3, 0.8, 1, 1), (0.4, 0.4, 0, 0)]
)
def test_the_outcomes_loss_is_its_formula(p1, p2, y1, y2):
    logits = [torch.tensor([math.log(p / (1 - p))]) for p in (p1, min(p1, p2), p2)]
    found = outcome_loss(Outcomes(*logits), torch.tensor([float(y1)]), torch.tensor([float(y2)]))
    final = min(p1, p2)
    expected = entropy(p1, y1) + entropy(final, y2)
    expected += 0.25 * ((p1 - y1) ** 2 + (final - y2) ** 2) + 0.2 * max(p2 - p1, 0)
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_segmentation_is_half_entropy_and_half_dice():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 4, 5)
    mask = (torch.rand(2, 3, 4, 5) < 0.3).to(torch.uint8)
    for row, found in enumerate(segmentation_loss(logits, mask)):
        p, y = logits[row].sigmoid().flatten().tolist(), mask[row].flatten().tolist()
        bce = sum(map(entropy, p, y)) / len(p)
        overlap = sum(a * b for a, b in zip(p, y, strict=True))
        dice = (2 * overlap + 1) / (sum(p) + sum(y) + 1)
        assert found.item() == pytest.approx(0.5 * bce + 0.5 * (1 - dice), rel=1e-5)


def test_a_mask_that_is_found_costs_next_to_nothing():
    mask = torch.zeros(1, 4, 8, 8, dtype=torch.uint8)
    mask[:, :, 2:5, 2:5] = 1
    right = segmentation_loss(mask.float() * 40 - 20, mask)
    assert right.item() < 1e-6
    assert segmentation_loss(20 - mask.float() * 40, mask).item() > 1


def maps_of(height: int = 6, width: int = 8, frames: int = 2) -> DetectionMaps:
    torch.manual_seed(1)
    shapes = {"heatmap": 1, "offset": 2, "size": 2, "intensity": 1}
    return DetectionMaps(*(torch.randn(1, frames, n, height, width) for n in shapes.values()))


def test_detection_is_focal_loss_and_l1_at_the_centres():
    maps = maps_of()
    boxes = torch.zeros(1, 2, 2, 5)
    boxes[0, 0, 0] = torch.tensor([0.4, 0.7, 0.5, 0.25, 0.9])  # cell x 3, y 4
    boxes[0, 1, 0] = torch.tensor([0.99, 0.01, 0.1, 0.1, 0.3])  # cell x 7, y 0
    expected = 0.0
    for frame in range(2):
        cx, cy, w, h = (boxes[0, frame, 0, :4] * torch.tensor([8, 6, 8, 6])).tolist()
        x0, y0 = int(cx), int(cy)
        sigma = max(max(w, h) / 6, 0.5)
        for y in range(6):
            for x in range(8):
                target = math.exp(-((x - x0) ** 2 + (y - y0) ** 2) / (2 * sigma**2))
                p = maps.heatmap[0, frame, 0, y, x].sigmoid().item()
                if (x, y) == (x0, y0):
                    expected += -((1 - p) ** 2) * math.log(p)
                else:
                    expected += -((1 - target) ** 4) * p**2 * math.log(1 - p)
        offset, size = maps.offset[0, frame, :, y0, x0], maps.size[0, frame, :, y0, x0]
        warm = maps.intensity[0, frame, 0, y0, x0]
        errors = (offset - torch.tensor([cx - x0, cy - y0])).abs().sum()
        errors = errors + (size - torch.tensor([w, h])).abs().sum()
        expected += 0.25 * (errors + (warm - boxes[0, frame, 0, 4]).abs()).item()
    assert detection_loss(maps, boxes).item() == pytest.approx(expected / 2, rel=1e-4)


def test_frames_without_objects_cost_only_what_is_seen_in_them():
    maps, boxes = maps_of(), torch.zeros(1, 2, 2, 5)
    p = maps.heatmap.sigmoid()
    expected = -(p.square() * (1 - p).log()).sum()
    assert detection_loss(maps, boxes).item() == pytest.approx(expected.item(), rel=1e-4)
    blind = maps._replace(heatmap=torch.full_like(maps.heatmap, -20.0))
    assert detection_loss(blind, boxes).item() < 1e-6


def test_the_change_is_where_the_masks_of_two_frames_differ():
    mask = torch.zeros(1, 8, 16, 16, dtype=torch.uint8)
    mask[:, 2, :8, :8] = 1
    mask[:, 6, 8:, 8:] = 1
    logits = torch.full((1, 1, 2, 2), -20.0)
    logits[0, 0, 0, 0] = logits[0, 0, 1, 1] = 20.0
    assert change_loss(logits, mask).item() < 1e-6
    assert change_loss(-logits, mask).item() == pytest.approx(20, rel=1e-4)


def test_the_loss_is_the_mean_of_the_losses_of_its_samples():
    clips = GeneratedClips(sizes=DEMO, num_clips=5, seed=3)
    model = build_model(DEMO, 0)
    with torch.no_grad():
        whole = collate(clips, range(5))
        together = batch_loss(model(whole), whole)
        alone = []
        for row in range(5):
            one = collate(clips, [row])
            alone.append(batch_loss(model(one), one))
    assert together.item() == pytest.approx(torch.stack(alone).mean().item(), rel=1e-5)


def test_samples_without_masks_and_boxes_are_trained_on_their_outcomes_alone():
    model = build_model(DEMO, 0)
    batch = blank_batch(DEMO, 2)
    batch["mask"].fill_(1)
    batch["has_mask"].zero_()
    batch["has_boxes"].zero_()
    bare = blank_batch(DEMO, 2, has_masks=False, has_boxes=False)
    with torch.no_grad():
        losses = [batch_loss(model(each), each).item() for each in (batch, bare)]
    assert losses[0] == pytest.approx(losses[1])
    batch["has_mask"][0] = 1
    with torch.no_grad():
        assert batch_loss(model(batch), batch).item() > losses[0] + 0.1
