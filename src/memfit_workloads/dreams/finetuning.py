"""Fine-tuning under Lightning: a head on the precursor's embedding, per objective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import BinaryAUROC

from .backbone import DreamsBackbone
from .batches import trimmed
from .losses import cosine_loss, focal_bce, triplet_loss
from .objectives import BINARY, CONTRASTIVE, FINGERPRINT, REGRESSION, Objective
from .schedule import Schedule, noam
from .sizes import DreamsSizes

TRIPLET_MARGIN = 0.1
"""Source: Bushuiev et al. 2025."""


class Scale(nn.Module):
    """Min-max scaling of properties, learned from the training labels alone."""

    lowest: Tensor
    width: Tensor

    def __init__(self, labels: Tensor) -> None:
        super().__init__()
        self.register_buffer("lowest", labels.amin(0))
        width = labels.amax(0) - labels.amin(0)
        self.register_buffer("width", torch.where(width == 0, torch.ones_like(width), width))

    def forward(self, values: Tensor) -> Tensor:
        """Return values of the training labels' range as 0 to 1."""
        return (values - self.lowest) / self.width

    def undo(self, scaled: Tensor) -> Tensor:
        """Return what was scaled."""
        return scaled * self.width + self.lowest


def make_head(sizes: DreamsSizes, num_outputs: int, depth: int) -> nn.Sequential:
    """Return ``depth`` linear layers, ReLU and dropout between them."""
    width = sizes.d_model
    hidden = [
        layer
        for _ in range(depth - 1)
        for layer in (nn.Linear(width, width), nn.ReLU(), nn.Dropout(sizes.dropout))
    ]
    return nn.Sequential(*hidden, nn.Linear(width, num_outputs))


class DreamsFinetuning(LightningModule):
    """The backbone with one head; it may stay frozen for some epochs, or in part."""

    def __init__(
        self,
        sizes: DreamsSizes,
        objective: Objective,
        schedule: Schedule,
        *,
        head_depth: int = 1,
        train_labels: Tensor | None = None,
        unfreeze_at_epoch: int = 0,
        num_frozen_layers: int = 0,
        focal_gamma: float = 0.0,
        trim_padding: bool = False,
    ) -> None:
        super().__init__()
        self.sizes, self.objective, self._schedule = sizes, objective, schedule
        self._unfreeze_at_epoch, self._num_frozen = unfreeze_at_epoch, num_frozen_layers
        self._gamma, self._trim = focal_gamma, trim_padding
        self.backbone = DreamsBackbone(sizes)
        self.head = make_head(sizes, objective.num_outputs, head_depth)
        labels = torch.zeros(1, objective.num_outputs) if train_labels is None else train_labels
        self.scale = Scale(labels) if objective.kind == REGRESSION else None
        # Logged as objects: Lightning computes them at the end of a pass and resets them, so that
        # what they keep is that of one pass over the validation data.
        self.val_score: Metric = BinaryAUROC() if objective.kind == BINARY else MeanMetric()
        self._freeze(is_frozen=unfreeze_at_epoch > 0)

    def _freeze(self, *, is_frozen: bool) -> None:
        self.backbone.requires_grad_(not is_frozen)
        if self._num_frozen:
            self.backbone.fourier.requires_grad_(False)
            self.backbone.peak.requires_grad_(False)
            for block in list(self.backbone.blocks)[: self._num_frozen]:
                block.requires_grad_(False)

    def unfreeze_all(self) -> None:
        """Let all learn that will ever learn; a step is at its largest then."""
        self._freeze(is_frozen=False)

    def on_train_epoch_start(self) -> None:
        """Let the backbone learn from its epoch on."""
        if self._unfreeze_at_epoch:
            self._freeze(is_frozen=self.current_epoch < self._unfreeze_at_epoch)

    def embed(self, spectra: Tensor) -> Tensor:
        """Return the embedding of each spectrum, (B, D), through the contrastive head if any."""
        embedding = self.backbone.embed(spectra)
        return self.head(embedding) if self.objective.kind == CONTRASTIVE else embedding

    def forward(self, spectra: Tensor) -> Tensor:
        """Return the head's output of each spectrum, (B, outputs)."""
        return self.head(self.backbone.embed(spectra))

    def predict(self, spectra: Tensor) -> Tensor:
        """Return what the objective is about: probabilities, properties, bits or embeddings."""
        out = self(spectra)
        if self.scale is not None:
            return self.scale.undo(out)
        return out.sigmoid() if self.objective.kind in (BINARY, FINGERPRINT) else out

    def sample_losses(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of each sample, (B,); the batch axis is kept at any size."""
        if self._trim:
            batch = trimmed(batch)
        out = self(batch["spectra"].flatten(0, 1))
        return self._losses_of(out, batch["target"])

    def _losses_of(self, out: Tensor, target: Tensor) -> Tensor:
        kind = self.objective.kind
        if kind == CONTRASTIVE:
            anchor, positive, negative = out.unflatten(0, (-1, 3)).unbind(1)
            return triplet_loss(anchor, positive, negative, TRIPLET_MARGIN)
        if kind == BINARY:
            return focal_bce(out, target, self._gamma).mean(1)
        if kind == FINGERPRINT:
            return cosine_loss(out.sigmoid(), target)
        assert self.scale is not None
        return F.mse_loss(out, self.scale(target), reduction="none").mean(1)

    def training_loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss."""
        return self.sample_losses(batch).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        del batch_idx
        loss = self.training_loss(batch)
        size = len(batch["spectra"])
        self.log("train_loss", loss.detach(), on_step=False, on_epoch=True, batch_size=size)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss and the objective's score."""
        del batch_idx
        out = self(batch["spectra"].flatten(0, 1))
        losses = self._losses_of(out, batch["target"])
        self.log("val_loss", losses.mean(), batch_size=len(losses))
        if self.objective.kind == BINARY:
            self.val_score.update(out[:, 0].sigmoid(), batch["target"][:, 0].long())
        else:
            self.val_score.update(self._score(out, batch["target"], losses))
        self.log("val_score", self.val_score, batch_size=len(losses))

    def _score(self, out: Tensor, target: Tensor, losses: Tensor) -> Tensor:
        """Return what is reported of each sample: cosine, absolute error, or triplets kept."""
        if self.scale is not None:
            return (self.scale.undo(out) - target).abs().mean(1)
        return (losses == 0).float() if self.objective.kind == CONTRASTIVE else 1 - losses

    def configure_optimizers(self) -> Any:
        """Return Adam over backbone and head; what is frozen has no gradient and stays."""
        # All of them: who is unfrozen at a later epoch has to be known here already.
        return noam(self.parameters(), self._schedule)
