"""Trains a job under an engine of DeepSpeed, exactly: ZeRO 1, 2 and 3, with and without offload.

DeepSpeed is imported when an engine is made, not before: configurations are written without it.
"""

from __future__ import annotations

from memfit.integrations.deepspeed.choice import ZeroChoice
from memfit.integrations.deepspeed.config import (
    AdaptedConfig,
    adapted,
    choice_of,
    config_of,
    write_config,
)
from memfit.integrations.deepspeed.ending import EngineStoppedError
from memfit.integrations.deepspeed.rank_memory import RankMemory, predict_rank
from memfit.integrations.deepspeed.run import EngineRun, EngineStep
from memfit.integrations.deepspeed.starting import fit, start

__all__ = [
    "AdaptedConfig",
    "EngineRun",
    "EngineStep",
    "EngineStoppedError",
    "RankMemory",
    "ZeroChoice",
    "adapted",
    "choice_of",
    "config_of",
    "fit",
    "predict_rank",
    "start",
    "write_config",
]
