"""GeoMLP: the geometry of a motion as an embedding.

Shape suffixes: B samples, E embedding. Its inputs are made by `KineFeat`, which has no weights.
"""

from __future__ import annotations

from torch import nn

from .kine_feat import NUM_FLAT_FEATURES
from .sizes import TridentSizes


class GeoMLP(nn.Sequential):
    """Turn 69 features into an embedding: (B, 69) to (B, E).

    The features are the 27 quantities, their 18 differences from moment to moment, and the 24 of
    `KineFeat`.

    Two hidden layers bring the weights to the documented 0.05 M; a single one would make 0.03 M.
    """

    def __init__(self, sizes: TridentSizes) -> None:
        hidden = sizes.geo_hidden
        super().__init__(
            nn.Linear(NUM_FLAT_FEATURES, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.Linear(hidden, sizes.geo_dim),
        )
