"""Batch-norm replay: exact micro-batching for models whose batch normalisation couples samples."""

from __future__ import annotations

from .strategy import BatchNormReplay as BatchNormReplay

__all__ = ["BatchNormReplay"]
