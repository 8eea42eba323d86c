"""Influence of training samples: exact inner products of per-sample gradients, never made."""

from __future__ import annotations

from .checkpoints import Checkpoint as Checkpoint
from .one_to_many import one_to_many_losses as one_to_many_losses
from .results import Progress as Progress
from .results import Ranked as Ranked
from .results import ScanPrediction as ScanPrediction
from .results import Scores as Scores
from .results import SelfInfluence as SelfInfluence
from .samples import Samples as Samples
from .scan import Scan as Scan
from .scan import scores as scores
from .scan import self_influence as self_influence

__all__ = [
    "Checkpoint",
    "Progress",
    "Ranked",
    "Samples",
    "Scan",
    "ScanPrediction",
    "Scores",
    "SelfInfluence",
    "one_to_many_losses",
    "scores",
    "self_influence",
]
