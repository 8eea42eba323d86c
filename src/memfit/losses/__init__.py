"""Losses over many candidates, computed whole or streamed in chunks with the same result."""

from __future__ import annotations

from .chunking import StreamableLoss as StreamableLoss
from .chunking import chunk_size as chunk_size
from .chunking import chunked as chunked
from .chunking import note_loss as note_loss
from .chunking import noted_losses as noted_losses
from .contrastive import cached_embeddings as cached_embeddings
from .contrastive import contrastive_loss as contrastive_loss
from .contrastive import one_to_many_cross_entropy as one_to_many_cross_entropy
from .linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from .mixture import Kernels as Kernels
from .mixture import mixture_log_density as mixture_log_density
from .mixture import mixture_means as mixture_means
from .mixture import mixture_score as mixture_score
from .mixture import mixture_score_matching as mixture_score_matching
from .mixture import score_matching_of as score_matching_of
from .one_to_many import one_to_many_bce as one_to_many_bce
from .positives import PositivePairs as PositivePairs
from .softmax_mean import SoftmaxMean as SoftmaxMean
from .softmax_mean import softmax_mean as softmax_mean
from .softmax_mean import softmax_mean_of_parts as softmax_mean_of_parts

__all__ = [
    "Kernels",
    "PositivePairs",
    "SoftmaxMean",
    "StreamableLoss",
    "cached_embeddings",
    "chunk_size",
    "chunked",
    "contrastive_loss",
    "linear_cross_entropy",
    "mixture_log_density",
    "mixture_means",
    "mixture_score",
    "mixture_score_matching",
    "note_loss",
    "noted_losses",
    "one_to_many_bce",
    "one_to_many_cross_entropy",
    "score_matching_of",
    "softmax_mean",
    "softmax_mean_of_parts",
]
