"""What one clip is, and batches of clips.

Shape suffixes: T frames, H height, W width, K objects of a frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .kine_feat import NUM_MOMENTS, NUM_QUANTITIES
from .sizes import TridentSizes

NUM_OBJECTS = 2
"""Objects of a frame that the detector is trained on, at most."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Clip:
    """One record: what the sensors have seen, and what came of it."""

    rgb: Tensor
    """(3, T, H, W) uint8."""
    infrared: Tensor
    """(1, T, H, W) uint8; zeros where there was no camera."""
    kinematics: Tensor
    """(3, 9) float32: x, y, z (m), vx, vy, vz (m/s), range (m), bearing, elevation (rad)."""
    class_id: int
    class_conf: float
    event: float
    severe: float
    mask: Tensor | None = None
    """(T, H, W) uint8, 1 where the object is."""
    boxes: Tensor | None = None
    """(T, K, 5) float32: centre x and y, width, height as fractions of the frame, and intensity."""


class Clips(Protocol):
    """Clips by their number."""

    @property
    def has_masks(self) -> bool:
        """Return whether some clip has a mask."""

    @property
    def has_boxes(self) -> bool:
        """Return whether some clip has boxes."""

    def __len__(self) -> int: ...

    def clip(self, number: int) -> Clip:
        """Return one clip, the same at every call."""

    def events(self) -> Sequence[float]:
        """Return which clips are events, without reading their frames."""

    def fingerprint(self) -> str:
        """Return what clips with another content do not have, without reading their frames."""


def collate(clips: Clips, rows: Sequence[int]) -> dict[str, Tensor]:
    """Read clips one after the other, and stack them to a batch."""
    return stack(clips, [clips.clip(row) for row in rows])


def stack(clips: Clips, each: Sequence[Clip]) -> dict[str, Tensor]:
    """Stack clips to a batch; ``clips``, where they are from, says whether some have targets."""
    batch = {
        "rgb": torch.stack([clip.rgb for clip in each]),
        "infrared": torch.stack([clip.infrared for clip in each]),
        "kinematics": torch.stack([clip.kinematics for clip in each]),
        "class_id": torch.tensor([clip.class_id for clip in each]),
        "class_conf": torch.tensor([clip.class_conf for clip in each]),
        "event": torch.tensor([clip.event for clip in each]),
        "severe": torch.tensor([clip.severe for clip in each]),
    }
    if clips.has_masks:
        batch |= _optional("mask", [clip.mask for clip in each], each[0].rgb[0])
    if clips.has_boxes:
        like = torch.zeros(each[0].rgb.shape[1], NUM_OBJECTS, 5)
        batch |= _optional("boxes", [clip.boxes for clip in each], like)
    return batch


def _optional(name: str, targets: Sequence[Tensor | None], like: Tensor) -> dict[str, Tensor]:
    """Stack targets that some clips lack, and say which have them."""
    stacked = [torch.zeros_like(like) if target is None else target for target in targets]
    has = [float(target is not None) for target in targets]
    return {name: torch.stack(stacked), f"has_{name}": torch.tensor(has)}


def blank_batch(
    sizes: TridentSizes, num_samples: int, *, has_masks: bool = True, has_boxes: bool = True
) -> dict[str, Tensor]:
    """Make a batch of the right shapes and types, without content."""
    frames = (sizes.num_frames, sizes.height, sizes.width)
    batch = {
        "rgb": torch.zeros(num_samples, 3, *frames, dtype=torch.uint8),
        "infrared": torch.zeros(num_samples, 1, *frames, dtype=torch.uint8),
        "kinematics": torch.zeros(num_samples, NUM_MOMENTS, NUM_QUANTITIES),
        "class_id": torch.zeros(num_samples, dtype=torch.int64),
        "class_conf": torch.ones(num_samples),
        "event": torch.zeros(num_samples),
        "severe": torch.zeros(num_samples),
    }
    if has_masks:
        batch["mask"] = torch.zeros(num_samples, *frames, dtype=torch.uint8)
        batch["has_mask"] = torch.ones(num_samples)
    if has_boxes:
        batch["boxes"] = torch.zeros(num_samples, sizes.num_frames, NUM_OBJECTS, 5)
        batch["has_boxes"] = torch.ones(num_samples)
    return batch
