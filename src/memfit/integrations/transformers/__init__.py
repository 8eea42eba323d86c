"""Fits a training of transformers' Trainer into its memory."""

from __future__ import annotations

from memfit.integrations.transformers.attaching import (
    AttachedTrainer,
    MemfitTrainerMixin,
    attach,
    fit,
    is_attached,
)
from memfit.integrations.transformers.planning import plan, predict

__all__ = [
    "AttachedTrainer",
    "MemfitTrainerMixin",
    "attach",
    "fit",
    "is_attached",
    "plan",
    "predict",
]
