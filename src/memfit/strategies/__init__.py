"""The strategies, a file or a package each. ``CATALOGUE`` lists them in display order."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from memfit.errors import StrategyError
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.activation_offload import ActivationOffload
from memfit.strategies.allocator_settings import AllocatorConf
from memfit.strategies.base import Numerics, Strategy
from memfit.strategies.batchnorm_replay import BatchNormReplay
from memfit.strategies.bf16 import Bf16
from memfit.strategies.cached_gradients import CachedGradients
from memfit.strategies.convolution_tiling import ConvolutionTiling
from memfit.strategies.ddp import Ddp
from memfit.strategies.eight_bit_optimizer import EightBitOptimizer
from memfit.strategies.four_bit_base import FourBitBase
from memfit.strategies.fp16 import Fp16
from memfit.strategies.frozen_offload import FrozenOffload
from memfit.strategies.fsdp2 import Fsdp2
from memfit.strategies.fused_attention import FusedAttention
from memfit.strategies.host_modules import HostModules
from memfit.strategies.linear_cross_entropy import LinearCrossEntropy
from memfit.strategies.loss_chunking import LossChunking
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.optimizer_implementation import OptimizerImplementation
from memfit.strategies.optimizer_in_backward import OptimizerInBackward
from memfit.strategies.optimizer_offload import OptimizerOffload
from memfit.strategies.pure_bf16 import PureBf16
from memfit.strategies.tiling import Tiling

CATALOGUE: tuple[type[Strategy], ...] = (
    Ddp,
    Fsdp2,
    AllocatorConf,
    FusedAttention,
    FourBitBase,
    PureBf16,
    EightBitOptimizer,
    OptimizerImplementation,
    OptimizerOffload,
    OptimizerInBackward,
    HostModules,
    LinearCrossEntropy,
    LossChunking,
    Tiling,
    ConvolutionTiling,
    FrozenOffload,
    ActivationCheckpointing,
    ActivationOffload,
    MicroBatching,
    BatchNormReplay,
    CachedGradients,
    Bf16,
    Fp16,
)


def strategy_class(name: str) -> type[Strategy]:
    """Find a strategy by its name.

    Raises:
        StrategyError: if there is none, with the nearest names.
    """
    by_name = {strategy.name: strategy for strategy in CATALOGUE}
    if name in by_name:
        return by_name[name]
    near = get_close_matches(name, by_name, n=2, cutoff=0.5)
    hint = f"Nearest: {', '.join(near)}" if near else f"There are: {', '.join(by_name)}"
    raise StrategyError(name, f"there is no such strategy. {hint}.")


def build_strategy(name: str, settings: Mapping[str, Any]) -> Strategy:
    """Build a strategy from its name and plain settings."""
    return strategy_class(name).from_settings(settings)


__all__ = [
    "CATALOGUE",
    "ActivationCheckpointing",
    "ActivationOffload",
    "AllocatorConf",
    "BatchNormReplay",
    "Bf16",
    "CachedGradients",
    "ConvolutionTiling",
    "Ddp",
    "EightBitOptimizer",
    "FourBitBase",
    "Fp16",
    "FrozenOffload",
    "Fsdp2",
    "FusedAttention",
    "HostModules",
    "LinearCrossEntropy",
    "LossChunking",
    "MicroBatching",
    "Numerics",
    "OptimizerImplementation",
    "OptimizerInBackward",
    "OptimizerOffload",
    "PureBf16",
    "Strategy",
    "Tiling",
    "build_strategy",
    "strategy_class",
]
