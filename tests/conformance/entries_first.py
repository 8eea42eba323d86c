"""Entries of the first strategies."""

from __future__ import annotations

from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.batchnorm_replay import BatchNormReplay
from memfit.strategies.loss_chunking import LossChunking
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.optimizer_implementation import OptimizerImplementation

from .builders import (
    CONVOLUTION_TOLERANCE,
    Entry,
    batch_normalised,
    large_batch_normalised,
    large_many_candidates,
    large_residual,
    many_candidates,
    one_layer,
    ragged_tokens,
    residual,
    residual_with_clipping,
    samples_in_second_dimension,
    unknown_optimizer,
)

ENTRIES: tuple[Entry, ...] = (
    Entry(
        strategy=OptimizerImplementation,
        settings=tuple(
            OptimizerImplementation(implementation=name) for name in ("fused", "foreach", "loop")
        ),
        jobs=(residual, residual_with_clipping, ragged_tokens),
        large_job=large_residual,
        large_settings=tuple(
            OptimizerImplementation(implementation=name) for name in ("fused", "foreach", "loop")
        ),
        refusal=(
            OptimizerImplementation(implementation="fused"),
            unknown_optimizer,
            "Plain offers no choice",
        ),
    ),
    Entry(
        strategy=LossChunking,
        settings=(LossChunking(num_candidates=150), LossChunking(num_candidates=128)),
        jobs=(many_candidates,),
        large_job=large_many_candidates,
        large_settings=(LossChunking(num_candidates=1024), LossChunking(num_candidates=130)),
        refusal=(LossChunking(num_candidates=128), residual, "not computed by memfit.losses"),
    ),
    Entry(
        strategy=ActivationCheckpointing,
        settings=(
            ActivationCheckpointing(),
            ActivationCheckpointing(keep=("addmm.0", "convolution.0")),
        ),
        jobs=(residual, residual_with_clipping, ragged_tokens, batch_normalised),
        large_job=large_residual,
        large_settings=(
            ActivationCheckpointing(),
            ActivationCheckpointing(blocks=("0-1",), keep=("addmm.0",)),
        ),
        refusal=(ActivationCheckpointing(), one_layer, "no repeated blocks"),
    ),
    Entry(
        strategy=MicroBatching,
        settings=tuple(MicroBatching(micro_batch_size=size) for size in (1, 3, 4)),
        jobs=(
            residual,
            residual_with_clipping,
            ragged_tokens,
            samples_in_second_dimension,
            many_candidates,
        ),
        large_job=large_residual,
        large_settings=tuple(MicroBatching(micro_batch_size=size) for size in (192, 100)),
        refusal=(
            MicroBatching(micro_batch_size=2),
            batch_normalised,
            "The exact way is batchnorm-replay",
        ),
    ),
    Entry(
        strategy=BatchNormReplay,
        settings=tuple(BatchNormReplay(micro_batch_size=size) for size in (1, 3, 5)),
        jobs=(batch_normalised,),
        large_job=large_batch_normalised,
        large_settings=tuple(BatchNormReplay(micro_batch_size=size) for size in (16, 7)),
        peak_tolerance=CONVOLUTION_TOLERANCE,
        refusal=(BatchNormReplay(micro_batch_size=2), residual, "micro-batching does the same"),
    ),
)
