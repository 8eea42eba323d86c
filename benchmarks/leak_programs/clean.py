"""The programs that do not leak, though much in them grows for a while."""

from __future__ import annotations

from .clean_caches import (
    bounded_cache,
    bounded_queue,
    cache_of_lengths,
    dataset_cache,
    dataset_cache_of_a_loader,
    ever_longer_batches,
    history_of_floats,
    metric_reset_at_the_start,
    metric_with_reset,
    plain,
    small_detached_losses,
    trimmed_list,
    validation_cache,
    varying_lengths,
)
from .clean_training import (
    accumulated_gradients,
    best_checkpoints,
    collected_cycles,
    growing_model,
    hooks_with_handles,
    key_value_cache,
    moving_average,
    outputs_of_an_epoch,
    outputs_of_one_evaluation,
    replay_buffer,
    sanity_check_first,
    truncated_sequences,
)
from .training import Program

CLEAN = tuple(
    Program(name=(program.__doc__ or "").strip().rstrip("."), run=program)
    for program in (
        plain,
        varying_lengths,
        ever_longer_batches,
        history_of_floats,
        small_detached_losses,
        bounded_queue,
        trimmed_list,
        bounded_cache,
        cache_of_lengths,
        dataset_cache,
        dataset_cache_of_a_loader,
        validation_cache,
        metric_with_reset,
        metric_reset_at_the_start,
        outputs_of_an_epoch,
        outputs_of_one_evaluation,
        moving_average,
        best_checkpoints,
        key_value_cache,
        truncated_sequences,
        accumulated_gradients,
        replay_buffer,
        growing_model,
        collected_cycles,
        hooks_with_handles,
        sanity_check_first,
    )
)
