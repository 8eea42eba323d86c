"""The sizes that define a TRIDENT-Net model. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.errors import UsageError
from memfit_workloads.model_sizes import ModelSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class TridentSizes(ModelSizes):
    """Everything needed to build the model again; by default what the document says.

    Source: the TRIDENT-Net document and the parameter counts of its branches. What neither says
    (widths inside FlashNet-V, hidden widths of the small layers) is memfit's choice.
    """

    num_frames: int = 36
    height: int = 720
    width: int = 1280
    num_classes: int = 16
    video_channels: int = 32
    """Of the first level; the second has twice as many, the third four times, the bottom eight."""
    video_dim: int = 512
    vision_width: int = 256
    vision_feedforward: int = 512
    vision_heads: int = 4
    vision_grid_height: int = 9
    vision_grid_width: int = 16
    flash_channels: int = 64
    plume_width: int = 128
    plume_depth: int = 3
    plume_dim: int = 256
    curve_hidden: int = 288
    curve_dim: int = 256
    geo_hidden: int = 128
    geo_dim: int = 192
    tempo_width: int = 192
    tempo_feedforward: int = 768
    tempo_heads: int = 4
    class_dim: int = 32
    fusion_width: int = 512
    fusion_feedforward: int = 2048
    fusion_layers: int = 3
    fusion_heads: int = 8
    head_hidden: int = 256

    def __post_init__(self) -> None:
        for name, least in (("num_frames", 8), ("height", 16), ("width", 16), ("num_classes", 1)):
            if getattr(self, name) < least:
                flag = f"--{name.replace('_', '-')}"
                msg = f"{flag} {getattr(self, name)} is too small; at least {least} are needed."
                raise UsageError(msg)

    @property
    def image_dim(self) -> int:
        """Return the width of the RGB branch's embedding: 3-D and two-frame network together."""
        return self.video_dim + self.vision_width

    @property
    def thermal_dim(self) -> int:
        """Return the width of the infrared branch's embedding: detector and curves together."""
        return self.plume_dim + self.curve_dim

    @property
    def motion_dim(self) -> int:
        """Return the width of the kinematic branch's embedding."""
        return self.geo_dim + self.tempo_width


DOCUMENT = TridentSizes()
"""The document's size: 36 frames of 720 x 1280."""
DEMO = TridentSizes(
    num_frames=8,
    height=32,
    width=32,
    num_classes=8,
    video_channels=8,
    video_dim=32,
    vision_width=32,
    vision_feedforward=64,
    vision_heads=2,
    vision_grid_height=2,
    vision_grid_width=2,
    flash_channels=16,
    plume_width=16,
    plume_depth=2,
    plume_dim=32,
    curve_hidden=32,
    curve_dim=16,
    geo_hidden=32,
    geo_dim=16,
    tempo_width=16,
    tempo_feedforward=32,
    tempo_heads=2,
    class_dim=8,
    fusion_width=32,
    fusion_feedforward=64,
    fusion_layers=2,
    fusion_heads=2,
    head_hidden=32,
)
"""Small enough to train on a CPU in minutes."""
PRESETS = {"demo": DEMO, "document": DOCUMENT}
