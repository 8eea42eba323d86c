"""Pre-training under Lightning: masked peaks and the order of retention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from .backbone import DreamsBackbone
from .batches import trimmed
from .losses import masked_mz_losses
from .schedule import Schedule, noam
from .sizes import DreamsSizes

MASK_WEIGHT, ORDER_WEIGHT = 0.8, 0.2
"""Source: Bushuiev et al. 2025."""


class DreamsPretraining(LightningModule):
    """The backbone with its two pre-training heads."""

    def __init__(
        self, sizes: DreamsSizes, schedule: Schedule, *, trim_padding: bool = False
    ) -> None:
        super().__init__()
        self.sizes, self._schedule, self._trim = sizes, schedule, trim_padding
        self.backbone = DreamsBackbone(sizes)
        self.mz_head = nn.Linear(sizes.d_model, sizes.num_mz_bins)
        self.order_head = nn.Linear(2 * sizes.d_model, 1)

    def losses(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what the loss is made of.

        Args:
            batch: of `PretrainingDataset`, with B pairs.

        Returns:
            The masked loss of each spectrum (2B,), the order's loss of each pair (B,), the hidden
            state of each masked peak (2B, K, D), and the order's logits (B,).
        """
        if self._trim:
            batch = trimmed(batch)
        spectra = batch["spectra"].flatten(0, 1)
        positions, targets, weights = (
            batch[name].flatten(0, 1) for name in ("positions", "targets", "weights")
        )
        tokens = self.backbone(spectra)
        hidden = tokens.gather(1, positions[..., None].expand(-1, -1, tokens.shape[-1]))
        by_peak = masked_mz_losses(
            hidden.flatten(0, 1),
            self.mz_head.weight,
            self.mz_head.bias,
            targets.flatten(),
            self.sizes.loss_rows,
        )
        masked = (by_peak.view_as(weights) * weights).sum(1)
        pairs = tokens[:, 0].reshape(-1, 2 * tokens.shape[-1])
        logits = self.order_head(pairs)[:, 0]
        order = F.binary_cross_entropy_with_logits(
            logits, batch["earlier"].to(logits.dtype), reduction="none"
        )
        return masked, order * batch["is_pair"], hidden, logits

    def training_loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return 0.8 of the mean masked loss and 0.2 of the mean order loss."""
        masked, order, _, _ = self.losses(batch)
        return MASK_WEIGHT * masked.mean() + ORDER_WEIGHT * order.mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        del batch_idx
        loss = self.training_loss(batch)
        self.log("train_loss", loss.detach(), on_step=False, on_epoch=True, batch_size=_size(batch))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss, masked-peak accuracy and order accuracy."""
        del batch_idx
        masked, order, hidden, logits = self.losses(batch)
        scores = {
            "val_loss": MASK_WEIGHT * masked.mean() + ORDER_WEIGHT * order.mean(),
            "val_mask_top1": self.masked_top1(hidden, batch),
            "val_order_accuracy": ((logits > 0) == (batch["earlier"] > 0)).float().mean(),
        }
        # Means alone are kept from batch to batch: nothing grows with the data or the epochs.
        self.log_dict(scores, batch_size=_size(batch))

    def masked_top1(self, hidden: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the share of masked peaks whose class is the likeliest."""
        is_masked = batch["weights"].flatten(0, 1) > 0
        rows = hidden[is_masked]
        targets = batch["targets"].flatten(0, 1)[is_masked]
        right = rows.new_zeros(())
        for part, target in zip(
            rows.split(self.sizes.loss_rows or len(rows)),
            targets.split(self.sizes.loss_rows or len(rows)),
            strict=True,
        ):
            right += (self.mz_head(part).argmax(-1) == target).sum()
        return right / max(len(rows), 1)

    def configure_optimizers(self) -> Any:
        """Return Adam under the Noam schedule."""
        return noam(self.parameters(), self._schedule)


def _size(batch: Mapping[str, Tensor]) -> int:
    return len(batch["spectra"])
