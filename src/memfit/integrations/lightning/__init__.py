"""Fits a training of Lightning into its memory: one callback on an ordinary Trainer."""

from __future__ import annotations

from memfit.integrations.lightning.callback import MemfitCallback
from memfit.integrations.lightning.planning import plan, predict

__all__ = ["MemfitCallback", "plan", "predict"]
