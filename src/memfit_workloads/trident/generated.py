"""Clips made by a seed: every sensor carries a signal of its own, and only together they tell.

Each clip has four causes, drawn independently: how warm in colour the moving object is (RGB), how
slowly it cools (infrared), how fast it closes in (kinematics) and the risk of its class. Their sum,
with some noise, decides: above 0 there is an event, above 1.2 a severe one. So an event implies
nothing about a single sensor with certainty, and one sensor alone stays far from all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray

from .clips import NUM_OBJECTS, Clip
from .footage import Footage
from .sizes import TridentSizes

_SEVERE_ABOVE, _NOISE, _LARGEST_CAUSE = 1.2, 0.3, 2.5
_SENSOR_NOISE = 0.04
_RANGE, _CLOSING, _CLOSING_PER_CAUSE = (3000.0, 400.0), 80.0, 35.0
_SECONDS_BETWEEN = 1.2
"""Of the three moments of the kinematics, about the document's windows."""
_GROUND = 1
"""Of a clip's own random numbers, those that choose its footage."""
_DIMMED, _CLUTTER = 0.6, 0.2
"""How bright footage is behind a shape, in colour and in infrared."""
_PICTURE = NDArray[np.float32]


class _Causes(NamedTuple):
    """What makes a clip an event."""

    colour: float
    warmth: float
    closing: float
    class_id: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedClips:
    """So many clips of a seed; a clip depends on the seed and its number alone."""

    sizes: TridentSizes
    num_clips: int
    seed: int
    has_masks: bool = True
    has_boxes: bool = True
    footage: Footage | None = None
    """Behind the shapes; None for one colour. What is drawn of a clip besides stays the same."""

    def __len__(self) -> int:
        return self.num_clips

    def clip(self, number: int) -> Clip:
        """Draw one clip."""
        draw = np.random.default_rng([self.seed, number])
        cause = self._causes(draw)
        ground = None
        if self.footage is not None:
            ground = self.footage.window(np.random.default_rng([self.seed, number, _GROUND]))
        rgb, infrared, mask, boxes = _frames(draw, self.sizes, cause, ground)
        return Clip(
            rgb=_pixels(rgb),
            infrared=_pixels(infrared),
            kinematics=torch.from_numpy(_motion(draw, cause.closing)),
            class_id=cause.class_id,
            class_conf=float(np.float32(draw.uniform(0.7, 1.0))),
            event=float(cause.score > 0),
            severe=float(cause.score > _SEVERE_ABOVE),
            mask=torch.from_numpy(mask) if self.has_masks else None,
            boxes=torch.from_numpy(boxes) if self.has_boxes else None,
        )

    def events(self) -> list[float]:
        """Return which clips are events."""
        draws = (np.random.default_rng([self.seed, number]) for number in range(len(self)))
        return [float(self._causes(draw).score > 0) for draw in draws]

    def fingerprint(self) -> str:
        """Return what the clips depend on."""
        behind = "one colour" if self.footage is None else self.footage.fingerprint()
        return f"generated: {replace(self, footage=None)} on {behind}"

    def _causes(self, draw: Generator) -> _Causes:
        """Draw what makes a clip an event, first of all."""
        drawn = draw.standard_normal(3).clip(-_LARGEST_CAUSE, _LARGEST_CAUSE)
        class_id = int(draw.integers(self.sizes.num_classes))
        noise = _NOISE * draw.standard_normal()
        score = drawn.sum() + class_risk(class_id, self.sizes.num_classes) + noise
        colour, warmth, closing = drawn.tolist()
        return _Causes(colour, warmth, closing, class_id, float(score))


def class_risk(class_id: int, num_classes: int) -> float:
    """Return the cause that a class stands for: spread like a normal distribution, not in order."""
    place = (3 * class_id + 1) % num_classes if num_classes % 3 else class_id
    return NormalDist().inv_cdf((place + 0.5) / num_classes)


def _frames(
    draw: Generator, sizes: TridentSizes, cause: _Causes, ground: _PICTURE | None
) -> tuple[_PICTURE, _PICTURE, NDArray[np.uint8], _PICTURE]:
    """Draw a moving disc or square, in colour and in infrared, with its mask and its boxes.

    Behind it is one colour, or a ground of (3, T, H, W) that shows faintly in infrared too.
    """
    times = np.linspace(0, 1, sizes.num_frames)[:, None, None]
    begin, move = draw.uniform(0.3, 0.7, 2), draw.uniform(-0.25, 0.25, 2)
    half = draw.uniform(0.12, 0.2)
    ys = np.linspace(0, 1, sizes.height)[None, :, None]
    xs = np.linspace(0, 1, sizes.width)[None, None, :]
    centre_x, centre_y = (begin[axis] + move[axis] * times for axis in (0, 1))
    across, down = np.abs(xs - centre_x), np.abs(ys - centre_y)
    is_disc = draw.random() < 0.5
    mask = (across**2 + down**2 < half**2) if is_disc else np.maximum(across, down) < half
    shade = 0.25 * np.tanh(cause.colour) * times + 0.15 * np.tanh(cause.colour)
    level = draw.uniform(0.45, 0.6)
    colours = np.stack(np.broadcast_arrays(level + shade, level + 0 * shade, level - shade))
    grey, tint = draw.uniform(0.15, 0.35), draw.uniform(-0.05, 0.05, 3)
    behind: NDArray[Any] = (grey + tint)[:, None, None, None]
    cold: float | NDArray[Any] = 0.1
    if ground is not None:
        behind, cold = _DIMMED * ground, 0.05 + _CLUTTER * ground.mean(axis=0)
    rgb = np.where(mask[None], colours, behind)
    warmth = draw.uniform(0.75, 0.95) * np.exp(-times * np.exp(-0.7 * cause.warmth))
    infrared = np.where(mask, warmth, cold)[None]
    noisy = (
        each + _SENSOR_NOISE * draw.standard_normal(each.shape, dtype=np.float32)
        for each in (rgb, infrared)
    )
    boxes = np.zeros((sizes.num_frames, NUM_OBJECTS, 5), dtype=np.float32)
    side = np.full_like(times, 2 * half)
    boxes[:, 0] = np.stack([centre_x, centre_y, side, side, warmth], axis=-1)[:, 0, 0]
    return next(noisy), next(noisy), mask.astype(np.uint8), boxes


def _motion(draw: Generator, cause: float) -> _PICTURE:
    """Draw an object that closes in, the faster the higher the cause, at three moments: (3, 9)."""
    bearing, elevation = draw.uniform(-0.5, 0.5), draw.uniform(0.05, 0.3)
    flat = np.cos(elevation)
    direction = np.array([flat * np.cos(bearing), flat * np.sin(bearing), np.sin(elevation)])
    sideways = np.cross(direction, [0.0, 0.0, 1.0])
    closing = _CLOSING + _CLOSING_PER_CAUSE * cause + draw.normal(0, 5)
    velocity = -closing * direction + draw.normal(0, 30) * sideways
    begin = draw.normal(*_RANGE) * direction
    moments = np.zeros((3, 9), dtype=np.float32)
    for number, moment in enumerate(moments):
        place = begin + number * _SECONDS_BETWEEN * velocity
        distance = np.linalg.norm(place)
        angles = (np.arctan2(place[1], place[0]), np.arcsin(place[2] / distance))
        moment[:] = [*place, *(velocity + draw.normal(0, 2, 3)), distance, *angles]
    return moments


def _pixels(fractions: _PICTURE) -> torch.Tensor:
    """Turn fractions into bytes."""
    return torch.from_numpy((fractions.clip(0, 1) * 255).round().astype(np.uint8))
