"""Losses over many candidates, computed whole or streamed in chunks with the same result."""

from __future__ import annotations

from .chunking import StreamableLoss as StreamableLoss
from .chunking import chunk_size as chunk_size
from .chunking import chunked as chunked
from .chunking import note_loss as note_loss
from .chunking import noted_losses as noted_losses
from .linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from .one_to_many import one_to_many_bce as one_to_many_bce

__all__ = [
    "StreamableLoss",
    "chunk_size",
    "chunked",
    "linear_cross_entropy",
    "note_loss",
    "noted_losses",
    "one_to_many_bce",
]
