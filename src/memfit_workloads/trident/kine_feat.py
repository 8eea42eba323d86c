"""KineFeat: fixed features of a motion that is known at three moments.

Shape suffixes: B samples, M moments.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

NUM_MOMENTS, NUM_QUANTITIES = 3, 9
NUM_FEATURES = 24
NUM_TOKEN_FEATURES = 32
NUM_FLAT_FEATURES = 69
SCALES = (1000.0, 1000.0, 1000.0, 100.0, 100.0, 100.0, 1000.0, 1.0, 1.0)
"""Metres (x, y, z), metres per second (vx, vy, vz), metres (range), radians (bearing, elevation):
what one unit inside the network stands for."""
_LEAST = 1e-6


class KineFeat(nn.Module):
    """Compute 24 features without weights, and the inputs of the two networks that follow.

    3 norms of the position, 2 rates of the range, 3 radial speeds, 2 rates of the bearing and 2 of
    the elevation, 3 lateral speeds, 9 accelerations (two differences of the velocity and the
    difference between these). Rates are differences from moment to moment.
    """

    def forward(self, motion_BM9: Tensor) -> tuple[Tensor, Tensor]:
        """Take (B, 3, 9) in metres, seconds and radians; give (B, 69) and tokens (B, 3, 32)."""
        scaled = motion_BM9 / motion_BM9.new_tensor(SCALES)
        position, velocity = scaled[..., :3], scaled[..., 3:6]
        distance = position.square().sum(dim=-1, keepdim=True).clamp_min(_LEAST).sqrt()
        direction = position / distance
        radial = (velocity * direction).sum(dim=-1, keepdim=True)
        lateral = velocity - radial * direction
        lateral_speed = lateral.square().sum(dim=-1, keepdim=True).clamp_min(_LEAST).sqrt()
        steps = scaled.diff(dim=1)
        accelerations = torch.cat([steps[..., 3:6], steps[..., 3:6].diff(dim=1)], dim=1)
        fixed = torch.cat(
            [
                *(each.flatten(1) for each in (distance, steps[..., 6], radial)),
                *(each.flatten(1) for each in (steps[..., 7], steps[..., 8], lateral_speed)),
                accelerations.flatten(1),
            ],
            dim=1,
        )
        flat = torch.cat([scaled.flatten(1), steps.flatten(1), fixed], dim=1)
        return flat, _tokens(scaled, torch.cat([distance, radial, lateral_speed, lateral], dim=-1))


def _tokens(scaled_BM9: Tensor, own: Tensor) -> Tensor:
    """Put together what is known of each moment: (B, 3, 32)."""
    changes = nn.functional.pad(scaled_BM9.diff(dim=1), (0, 0, 1, 0))
    angles = scaled_BM9[..., 7:9]
    speed = scaled_BM9[..., 3:6].square().sum(dim=-1, keepdim=True).clamp_min(_LEAST).sqrt()
    bend = nn.functional.pad(scaled_BM9[..., 3:6].diff(n=2, dim=1), (0, 0, 2, 0))
    return torch.cat([scaled_BM9, changes, own, angles.sin(), angles.cos(), speed, bend], dim=-1)
