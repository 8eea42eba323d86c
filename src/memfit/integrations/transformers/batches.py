"""Batches of a Trainer: the largest one, and the form in which sessions see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memfit.errors import MemfitError, StrategyError
from memfit.integrations.batches import can_look_ahead, num_rows, resized
from memfit.live_state import LiveState
from memfit.runtime.largest_batch import largest_batch
from memfit.session.batch_shapes import num_elements
from memfit.session.deterministic_draws import untouched_randomness

MOST_SECONDS = 10.0
"""Reading samples to find the largest may take so long."""
INPUTS, NUM_ITEMS = "inputs", "num_items"
_WITHOUT_PARTS = (str, bytes, int, float, bool, type(None), torch.Tensor)
"""What holds nothing for each sample but rows."""


def batch_of(inputs: Any, num_items: Any = None) -> dict[str, Any]:
    """Put what a collator gave and the items of the window into one batch.

    Raises:
        MemfitError: if the collator gave no mapping.
    """
    if not isinstance(inputs, Mapping):
        msg = (
            f"The collator gives a {type(inputs).__name__}. Batches of a Trainer are dictionaries "
            "of tensors here: return one from the collator."
        )
        raise MemfitError(msg)
    batch: dict[str, Any] = {INPUTS: plain(inputs)}
    if num_items is not None:
        batch[NUM_ITEMS] = num_items
    return batch


def plain(value: Any) -> Any:
    """Return mappings of any class as dictionaries, which torch can cut."""
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    return value


def rows_of(batch: Mapping[str, Any]) -> int:
    """Count the samples of a batch."""
    return num_rows(batch[INPUTS])


def of_size(batch: Mapping[str, Any], num_samples: int) -> dict[str, Any]:
    """Return a batch of another number of samples; its window counts the same items."""
    return {**batch, INPUTS: resized(batch[INPUTS], num_samples)}


def check_can_be_cut(batch: Mapping[str, Any]) -> None:
    """Refuse to cut a batch that holds more than tensors.

    Raises:
        StrategyError: if a part of it would not be cut with its samples.
    """
    for name, value in batch[INPUTS].items():
        if isinstance(value, _WITHOUT_PARTS):
            continue
        others = [leaf for leaf in tree_leaves(value) if not isinstance(leaf, torch.Tensor)]
        if others:
            reason = (
                f"{name!r} of the batch holds a {type(others[0]).__name__} where only tensors can "
                "be cut with their samples. Have the collator give tensors, or leave it out."
            )
            raise StrategyError("micro-batching", reason)


def largest_training_batch(trainer: Any) -> Any:
    """Build the largest batch of the training data as a step sees it; None if unknown.

    What a data set changes when it is read is put back, and so are all random states.

    Args:
        trainer: whose training has begun.
    """
    loader = trainer.callback_handler.train_dataloader
    loader = getattr(loader, "base_dataloader", loader)
    if not can_look_ahead(loader):
        return None
    before = LiveState({"data": loader}).snapshot()
    try:
        with untouched_randomness():
            inputs = largest_batch(loader, most_seconds=MOST_SECONDS).batch
            return trainer._prepare_inputs(plain(inputs))
    finally:
        before.restore()


def largest_of(samples: Sequence[Any]) -> Any:
    """Return the largest batch of a window."""
    return max(samples, key=num_elements)
