"""TRIDENT-Net as a memfit job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memfit.job import Job

from .clips import blank_batch
from .losses import batch_loss
from .model import build_model
from .sizes import TridentSizes

LEARNING_RATE, WEIGHT_DECAY, CLIP_GRAD_NORM = 2e-4, 0.05, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What one training step is told."""

    batch_size: int
    """Effective: of one update of the weights."""
    learning_rate: float = LEARNING_RATE
    weight_decay: float = WEIGHT_DECAY
    seed: int = 0
    has_masks: bool = True
    has_boxes: bool = True


def build_job(sizes: TridentSizes, settings: StepSettings) -> Job:
    """Describe one training step to memfit; the loss is a mean over samples."""

    def batch(num_samples: int) -> dict[str, Tensor]:
        return blank_batch(
            sizes, num_samples, has_masks=settings.has_masks, has_boxes=settings.has_boxes
        )

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay
        )

    return Job(
        model=lambda: build_model(sizes, settings.seed),
        batch=batch,
        loss=loss,
        optimizer=optimizer,
        batch_size=settings.batch_size,
        clip_grad_norm=CLIP_GRAD_NORM,
        name="trident",
    )


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean loss of a batch."""
    return batch_loss(model(batch), batch)
