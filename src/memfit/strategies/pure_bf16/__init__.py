"""Pure bf16: parameters, gradients, activations and optimizer states in bfloat16."""

from __future__ import annotations

from .strategy import PureBf16 as PureBf16

__all__ = ["PureBf16"]
