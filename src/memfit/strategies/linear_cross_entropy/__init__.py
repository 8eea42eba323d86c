"""Linear cross-entropy: a large output layer and its loss are computed in chunks of rows."""

from __future__ import annotations

from .strategy import LinearCrossEntropy as LinearCrossEntropy

__all__ = ["LinearCrossEntropy"]
