"""TRIDENT-Net: branches for video, infrared, kinematics and a class, and their fusion.

Shape suffixes: B samples, T frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .branches import BRANCHES
from .cool_curve import CoolCurve3, curves_of
from .dual_vision import DualVisionV2
from .flash_net import FlashNetV
from .fusion import CrossAttnFusion, Outcomes
from .geo_mlp import GeoMLP
from .kine_feat import KineFeat
from .plume_det import DetectionMaps, PlumeDetXL
from .sizes import TridentSizes
from .tempo_former import TinyTempoFormer
from .video_frag import VideoFrag3Dv2

_LARGEST_PIXEL = 255


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
        self.flash = FlashNetV(sizes)

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
        self.curves = CoolCurve3(sizes)

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
        self.geometry = GeoMLP(sizes)
        self.tempo = TinyTempoFormer(sizes)

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
