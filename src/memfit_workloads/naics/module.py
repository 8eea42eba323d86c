"""The contrastive training under Lightning. Shape suffixes: B anchors, V views, N = B V codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from .embedder import Embedded, EmbedderSizes, NaicsEmbedder
from .experts import balance_loss
from .losses import DECOUPLED, decoupled, hierarchy_loss, info_nce
from .lorentz import pair_distances, radii
from .tree import LINEAL_DISCOUNT, NUM_LEVELS, OTHER_SECTOR


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """What the loss is made of."""

    kind: str = DECOUPLED
    temperature: float = 0.07
    contrastive_weight: float = 1.0
    hierarchy_weight: float = 0.325
    balance_weight: float = 0.01
    radius_weight: float = 0.01
    target_radius: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """How weights move."""

    learning_rate: float = 2e-4
    weight_decay: float = 0.01
    warmup_steps: int = 500
    total_steps: int | None = None
    """After them the rate is 0; None keeps it after the warm-up."""


class NaicsContrastive(LightningModule):
    """The embedder under a contrastive loss with explicit negatives, and its companions.

    All terms are taken on the points and gate logits of the whole step. The embedder alone sees
    texts, and treats its rows separately: cached gradients run it piece by piece, and leave every
    term as it is.
    """

    def __init__(
        self, sizes: EmbedderSizes, loss: LossSettings, optimizer: OptimizerSettings
    ) -> None:
        super().__init__()
        self.sizes, self.loss_settings, self._optimizer = sizes, loss, optimizer
        self.embedder = NaicsEmbedder(sizes)

    def forward(self, tokens: Mapping[str, Tensor]) -> Embedded:
        """Embed rows of tokens."""
        found: Embedded = self.embedder(dict(tokens))
        return found

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        """Return the loss of a step."""
        del batch_idx
        terms = self.loss_terms(batch)
        size = len(batch["negatives"])
        for name, value in terms.items():
            self.log(f"train_{name}", value.detach(), on_step=False, on_epoch=True, batch_size=size)
        return terms["loss"]

    def loss_terms(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return each term of the loss, and their weighted sum as ``loss``."""
        settings = self.loss_settings
        tokens = {channel: ids.flatten(0, 1) for channel, ids in batch["tokens"].items()}
        points_ND, gate_NE = self.embedder(tokens)
        tree_NN = tree_distances(batch["paths"].flatten(0, 1)).to(points_ND.dtype)
        distances_NN = pair_distances(points_ND, points_ND, self.sizes.curvature)
        terms = {
            "contrastive": self._contrastive(distances_NN, batch),
            "hierarchy": hierarchy_loss(distances_NN, tree_NN),
            "balance": balance_loss(gate_NE, self.sizes.top_k),
            "radius": (radii(points_ND, self.sizes.curvature) - settings.target_radius)
            .square()
            .mean(),
        }
        weights = {
            "contrastive": settings.contrastive_weight,
            "hierarchy": settings.hierarchy_weight,
            "balance": settings.balance_weight,
            "radius": settings.radius_weight,
        }
        total = torch.stack([weights[name] * value for name, value in terms.items()]).sum()
        return {"loss": total, **terms}

    def _contrastive(self, distances_NN: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Hold each anchor's positive against its own negatives."""
        negatives_BK, is_negative_BK = batch["negatives"], batch["is_negative"]
        num_anchors = len(negatives_BK)
        num_views = len(distances_NN) // num_anchors
        similarity_BN = -distances_NN[::num_views] / self.loss_settings.temperature
        place_B = torch.arange(num_anchors, device=negatives_BK.device) * num_views + 1
        positive_B = similarity_BN.gather(1, place_B[:, None])[:, 0]
        negative_BK = similarity_BN.gather(1, negatives_BK)
        loss = decoupled if self.loss_settings.kind == DECOUPLED else info_nce
        return loss(positive_B, negative_BK, is_negative_BK)

    def configure_optimizers(self) -> Any:
        """Return AdamW over what learns, warmed up and let down linearly."""
        settings = self._optimizer
        optimizer = torch.optim.AdamW(
            [parameter for parameter in self.parameters() if parameter.requires_grad],
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
        )

        def share(step: int) -> float:
            up = min(1.0, (step + 1) / max(1, settings.warmup_steps))
            if settings.total_steps is None:
                return up
            return min(up, max(0.02, 1 - step / settings.total_steps))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def tree_distances(paths_NP: Tensor) -> Tensor:
    """Return the distances of all pairs of codes from their paths, (N, N)."""
    shared_NN = torch.stack(
        [column[:, None] == column[None] for column in paths_NP.unbind(1)]
    ).sum(0)
    depth_N = (paths_NP >= 0).sum(1)
    up_NN, down_NN = depth_N[:, None] - shared_NN, depth_N[None] - shared_NN
    is_lineal = (torch.minimum(up_NN, down_NN) == 0) & (torch.maximum(up_NN, down_NN) > 0)
    steps_NN = (up_NN + down_NN) - LINEAL_DISCOUNT * is_lineal
    # The same code shares even what is below it, which is nobody else's.
    steps_NN = torch.where(shared_NN == NUM_LEVELS, 0.0, steps_NN)
    return torch.where(shared_NN == 0, OTHER_SECTOR, steps_NN)
