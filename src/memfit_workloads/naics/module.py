"""The contrastive training under Lightning. Shape suffixes: B anchors, V views, N = B V codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from .embedder import Embedded, EmbedderSizes, NaicsEmbedder
from .experts import balance_loss
from .lorentz import pair_distances, radii
from .losses import DECOUPLED, PairSums, decoupled, info_nce, lambda_rank, summed
from .tree import LINEAL_DISCOUNT, NUM_LEVELS, OTHER_SECTOR


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """What the loss is made of."""

    kind: str = DECOUPLED
    temperature: float = 0.07
    contrastive_weight: float = 1.0
    hierarchy_weight: float = 0.325
    balance_weight: float = 0.01
    rank_weight: float = 0.0
    """Of the order of each anchor's positive and negatives by distance."""
    radius_weight: float = 0.01
    target_radius: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """How weights move."""

    learning_rate: float = 2e-4
    head_rate_fraction: float = 1.0
    """Of the rate: what the experts and the projection learn at, beside the encoders."""
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
        self.strict_loading = False  # checkpoints are without the frozen encoder
        self.sizes, self.loss_settings, self.optimizer_settings = sizes, loss, optimizer
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
        settings, size = self.loss_settings, len(batch["negatives"])
        tokens = {channel: ids.flatten(0, 1) for channel, ids in batch["tokens"].items()}
        points_ND, gate_NE = self.embedder(tokens)
        chunk = max(1, _PAIRS_AT_ONCE * size // len(points_ND) ** 2)
        contrast, ranks, anchors, *sums = summed(partial(self._sums, points_ND, batch), size, chunk)
        reach_N = radii(points_ND, self.sizes.curvature)
        terms = {
            "contrastive": contrast / anchors.clamp(min=1),
            "hierarchy": PairSums(*sums).hierarchy_loss(),
            "rank": ranks / anchors.clamp(min=1),
            "balance": balance_loss(gate_NE, self.sizes.top_k),
            "radius": (reach_N - settings.target_radius).square().mean(),
        }
        weights = {
            "contrastive": settings.contrastive_weight,
            "hierarchy": settings.hierarchy_weight,
            "rank": settings.rank_weight,
            "balance": settings.balance_weight,
            "radius": settings.radius_weight,
        }
        total = torch.stack([weights[name] * value for name, value in terms.items()]).sum()
        return {"loss": total, **terms}

    def _sums(
        self, points_ND: Tensor, batch: Mapping[str, Any], start: int, end: int
    ) -> tuple[Tensor, ...]:
        """Return sums of some anchors: contrastive losses, costs of order, and of all pairs."""
        num_views = len(points_ND) // len(batch["negatives"])
        paths_NP = batch["paths"].flatten(0, 1)
        rows = slice(start * num_views, end * num_views)
        tree_MN = tree_distances(paths_NP[rows], paths_NP).to(points_ND.dtype)
        distances_MN = pair_distances(points_ND[rows], points_ND, self.sizes.curvature)
        similarity_BN = -distances_MN[::num_views] / self.loss_settings.temperature
        negatives_BK = batch["negatives"][start:end]
        is_negative_BK = batch["is_negative"][start:end]
        place_B = torch.arange(start, end, device=negatives_BK.device) * num_views + 1
        list_BL = torch.cat([place_B[:, None], negatives_BK], 1)
        is_there_BL = torch.cat([torch.ones_like(is_negative_BK[:, :1]), is_negative_BK], 1)
        near_BL = similarity_BN.gather(1, list_BL)
        contrast = decoupled if self.loss_settings.kind == DECOUPLED else info_nce
        losses_B = contrast(near_BL[:, 0], near_BL[:, 1:], is_negative_BK)
        orders_B = lambda_rank(-near_BL, tree_MN[::num_views].gather(1, list_BL), is_there_BL)
        counted = is_negative_BK.any(1).to(points_ND.dtype).sum()
        return losses_B.sum(), orders_B.sum(), counted, *PairSums.of(distances_MN, tree_MN)

    def configure_optimizers(self) -> Any:
        """Return AdamW over what learns, warmed up and let down linearly."""
        settings = self.optimizer_settings
        encoders = [each for each in self.embedder.encoders.parameters() if each.requires_grad]
        known = set(map(id, encoders))
        head = [each for each in self.parameters() if each.requires_grad and id(each) not in known]
        rate = settings.learning_rate
        groups = [
            {"params": encoders, "lr": rate},
            {"params": head, "lr": rate * settings.head_rate_fraction},
        ]
        optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=settings.weight_decay)

        def share(step: int) -> float:
            up = min(1.0, (step + 1) / max(1, settings.warmup_steps))
            if settings.total_steps is None:
                return up
            return min(up, max(0.02, 1 - step / settings.total_steps))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def tree_distances(first_NP: Tensor, second_MP: Tensor) -> Tensor:
    """Return the distances of all pairs of codes from their paths, (N, M)."""
    columns = zip(first_NP.unbind(1), second_MP.unbind(1), strict=True)
    shared_NM = torch.stack([first[:, None] == second[None] for first, second in columns]).sum(0)
    up_NM = (first_NP >= 0).sum(1)[:, None] - shared_NM
    down_NM = (second_MP >= 0).sum(1)[None] - shared_NM
    is_lineal_NM = (torch.minimum(up_NM, down_NM) == 0) & (torch.maximum(up_NM, down_NM) > 0)
    steps_NM = (up_NM + down_NM) - LINEAL_DISCOUNT * is_lineal_NM
    # The same code shares even what is below it, which is nobody else's.
    steps_NM = torch.where(shared_NM == NUM_LEVELS, 0.0, steps_NM)
    return torch.where(shared_NM == 0, OTHER_SECTOR, steps_NM)


_PAIRS_AT_ONCE = 1 << 18
"""The pairs of more points are gone through in parts, so that memory does not grow with them."""
