"""TRIDENT-Net: branches for video, infrared, kinematics and a class, and their fusion.

Shape suffixes: B samples, T frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import TransformerLayer
from .branches import BRANCHES
from .dual_vision import DualVisionV2
from .fusion import CrossAttnFusion, Outcomes
from .kine_feat import NUM_FLAT_FEATURES, NUM_MOMENTS, NUM_TOKEN_FEATURES, KineFeat
from .plume_det import DetectionMaps, PlumeDetXL
from .sizes import TridentSizes
from .video_frag import VideoFrag3Dv2

_LARGEST_PIXEL = 255
_NUM_CURVES, _NUM_POINTS = 10, 3
_NUM_FEATURES = 6
_GRID = (4, 4)
_KERNEL = 5
_NUM_LAYERS = 2


class Answer(NamedTuple):
    """All that the model says of a batch of clips; None is what a branch that is not run says."""

    outcomes: Outcomes
    embeddings: dict[str, Tensor]
    """(B, E) of each modality, as the fusion takes them."""
    mask_logits: Tensor | None
    """(B, T, 1, H, W)."""
    change_logits: Tensor | None
    """(B, 1, h, w), over a coarse grid."""
    detections: DetectionMaps | None


class RgbBranch(nn.Module):
    """The 3-D U-Net and the two-frame network side by side, and FlashNet-V added to both."""

    def __init__(self, sizes: TridentSizes) -> None:
        super().__init__()
        self.video = VideoFrag3Dv2(sizes)
        self.vision = DualVisionV2(sizes)
        self.flash = _FlashNetV(sizes)

    def forward(self, clip_B3THW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Give the embedding, the mask's logits and the change's."""
        video, change = self.video(clip_B3THW), self.vision(clip_B3THW)
        embedding = torch.cat([video.embedding, change.embedding], dim=1) + self.flash(clip_B3THW)
        return embedding, video.mask_logits, change.mask_logits

    def embed(self, clip_B3THW: Tensor) -> Tensor:
        """Give the embedding alone, to the bit; the way up of the 3-D U-Net is left out."""
        video, change = self.video.embed_clip(clip_B3THW), self.vision(clip_B3THW).embedding
        return torch.cat([video, change], dim=1) + self.flash(clip_B3THW)


class InfraredBranch(nn.Module):
    """The detector, and the curves of what it finds."""

    def __init__(self, sizes: TridentSizes) -> None:
        super().__init__()
        self.detector = PlumeDetXL(sizes)
        self.curves = _CoolCurve3(sizes)

    def forward(self, clip_B1THW: Tensor) -> tuple[Tensor, DetectionMaps]:
        """Give the embedding and the detector's maps."""
        found = self.detector(clip_B1THW)
        curves = self.curves(curves_of(found.maps, clip_B1THW))
        return torch.cat([found.embedding, curves], dim=1), found.maps

    def embed(self, clip_B1THW: Tensor) -> Tensor:
        """Give the embedding alone."""
        embedding: Tensor = self(clip_B1THW)[0]
        return embedding


class KinematicBranch(nn.Module):
    """Fixed features of a motion, and two networks over them."""

    def __init__(self, sizes: TridentSizes) -> None:
        super().__init__()
        self.features = KineFeat()
        self.geometry = _GeoMLP(sizes)
        self.tempo = _TinyTempoFormer(sizes)

    def forward(self, motion_BM9: Tensor) -> Tensor:
        """Turn (B, 3, 9) into the embedding."""
        flat, tokens = self.features(motion_BM9)
        return torch.cat([self.geometry(flat), self.tempo(tokens)], dim=1)

    def embed(self, motion_BM9: Tensor) -> Tensor:
        """Give the embedding."""
        embedding: Tensor = self(motion_BM9)
        return embedding


class TridentNet(nn.Module):
    """Tell two nested outcomes from four kinds of sensor readings."""

    def __init__(self, sizes: TridentSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.rgb = RgbBranch(sizes)
        self.infrared = InfraredBranch(sizes)
        self.kinematics = KinematicBranch(sizes)
        self.object_class = nn.Embedding(sizes.num_classes, sizes.class_dim)
        self.fusion = CrossAttnFusion(sizes)

    def forward(self, batch: Mapping[str, Tensor]) -> Answer:
        """Answer for a batch of clips; frames are uint8 and become fractions here.

        A branch whose embedding is in the batch already, by its `embedding_key`, is not run.
        """
        embeddings: dict[str, Tensor] = {}
        seen: dict[str, Sequence[Any]] = {}
        for name in BRANCHES:
            given = batch.get(embedding_key(name))
            found = getattr(self, name)(as_inputs(name, batch[name])) if given is None else given
            # Of a motion there is nothing to tell but its embedding.
            embeddings[name], *seen[name] = found if isinstance(found, tuple) else (found,)
        # How sure the class is scales what is made of it.
        embeddings["class"] = self.object_class(batch["class_id"]) * batch["class_conf"][:, None]
        mask_logits, change_logits = seen["rgb"] or (None, None)
        (detections,) = seen["infrared"] or (None,)
        outcomes = self.fusion(embeddings)
        return Answer(outcomes, embeddings, mask_logits, change_logits, detections)


def embedding_key(branch: str) -> str:
    """Return where a batch has the embedding of a branch."""
    return f"{branch}_embedding"


def as_inputs(branch: str, readings: Tensor) -> Tensor:
    """Turn pixels from 0 to 255 into fractions; a motion stays as it is."""
    return readings if branch == "kinematics" else readings.float() / _LARGEST_PIXEL


def build_model(sizes: TridentSizes, seed: int) -> TridentNet:
    """Build a model whose weights depend on the seed alone; the random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TridentNet(sizes)


class _CoolCurve3(nn.Module):
    """Turn up to 10 curves of three points, their slopes and their bend into an embedding.

    Shape suffixes: B samples, K curves, h and w the sides of the maps, E embedding.
    """

    def __init__(self, sizes: TridentSizes) -> None:
        super().__init__()
        hidden = sizes.curve_hidden
        self.layers = nn.Sequential(
            nn.Linear(_NUM_CURVES * _NUM_FEATURES, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.Linear(hidden, sizes.curve_dim),
        )

    def forward(self, curves_BK3: Tensor) -> Tensor:
        """Turn curves (B, 10, 3), from 0 to 1 and 0 where there are fewer, into (B, E)."""
        slopes = curves_BK3.diff(dim=2)
        features = torch.cat([curves_BK3, slopes, slopes.diff(dim=2)], dim=2)
        embedding: Tensor = self.layers(features.flatten(1))
        return embedding


def curves_of(maps: DetectionMaps, clip_B1THW: Tensor) -> Tensor:
    """Read the warmth of the likeliest spots at three moments off a clip: (B, 10, 3).

    Spots are the cells with the highest heatmap on average over time; the choice has no gradient,
    what is read there has: the mean of the intensity that the detector gives and of what the camera
    has seen in that cell. Moments are the middles of the thirds of a clip.
    """
    num_frames, (height, width) = maps.heatmap.shape[1], maps.heatmap.shape[3:]
    moments = [(2 * third + 1) * num_frames // 6 for third in range(_NUM_POINTS)]
    likeliness = maps.heatmap.detach().mean(dim=(1, 2)).flatten(1)
    num_curves = min(_NUM_CURVES, height * width)
    cells = likeliness.topk(num_curves, dim=1).indices
    seen = nn.functional.adaptive_max_pool2d(clip_B1THW[:, 0, moments], (height, width))
    warmth = (0.5 * (seen + maps.intensity[:, moments, 0])).flatten(2)
    curves = warmth.gather(2, cells[:, None].expand(-1, _NUM_POINTS, -1)).transpose(1, 2)
    missing = _NUM_CURVES - num_curves
    return nn.functional.pad(curves, (0, 0, 0, missing)) if missing else curves


class _FlashNetV(nn.Module):
    """Convolve the colours of a coarse grid over time; sudden light gives a strong answer.

    Shape suffixes: B samples, T frames, H height, W width, C channels, E embedding.

    The document names this network and its temporal convolution and says no more of it; this
    definition is memfit's: two temporal convolutions over 4 x 4 averaged cells, whose mean and
    largest answer make the embedding. It is as wide as the rest of the RGB branch, to which it is
    added.
    """

    def __init__(self, sizes: TridentSizes) -> None:
        super().__init__()
        channels = sizes.flash_channels
        self.temporal = nn.Sequential(
            nn.Conv1d(3 * _GRID[0] * _GRID[1], channels, _KERNEL, padding=_KERNEL // 2),
            nn.GELU(),
            nn.Conv1d(channels, channels, _KERNEL, padding=_KERNEL // 2),
            nn.GELU(),
        )
        self.embed = nn.Linear(2 * channels, sizes.image_dim)

    def forward(self, clip_B3THW: Tensor) -> Tensor:
        """Turn clips (B, 3, T, H, W) into (B, E)."""
        frames = clip_B3THW.transpose(1, 2).flatten(2, 3)  # (B, T, 3 H, W)
        height = clip_B3THW.shape[3]
        cells = F.adaptive_avg_pool2d(
            frames.unflatten(2, (3, height)).flatten(1, 2), _GRID
        )  # (B, 3 T, 4, 4)
        cells_BTC = cells.unflatten(1, (-1, 3)).flatten(2)
        answer_BCT = self.temporal(cells_BTC.transpose(1, 2))
        summary = torch.cat([answer_BCT.mean(dim=2), answer_BCT.amax(dim=2)], dim=1)
        embedding: Tensor = self.embed(summary)
        return embedding


class _GeoMLP(nn.Sequential):
    """Turn 69 features into an embedding: (B, 69) to (B, E).

    Shape suffixes: B samples, E embedding. Its inputs are made by `KineFeat`, which has no weights.

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


class _TinyTempoFormer(nn.Module):
    """Encode three tokens of 32 features by two transformer layers.

    Shape suffixes: B samples, M moments, D width.
    """

    def __init__(self, sizes: TridentSizes) -> None:
        super().__init__()
        width = sizes.tempo_width
        self.project = nn.Linear(NUM_TOKEN_FEATURES, width)
        self.position = nn.Parameter(0.02 * torch.randn(NUM_MOMENTS, width))
        self.layers = nn.ModuleList(
            TransformerLayer(width, sizes.tempo_heads, sizes.tempo_feedforward)
            for _ in range(_NUM_LAYERS)
        )
        self.embed = nn.Sequential(
            nn.Linear(NUM_MOMENTS * width, width), nn.GELU(), nn.Linear(width, width)
        )

    def forward(self, tokens_BMF: Tensor) -> Tensor:
        """Turn tokens (B, 3, 32) into (B, D)."""
        x_BMD = self.project(tokens_BMF) + self.position
        for layer in self.layers:
            x_BMD = layer(x_BMD)
        embedding: Tensor = self.embed(x_BMD.flatten(1))
        return embedding
