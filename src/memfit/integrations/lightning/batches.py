"""Batches of Lightning's loaders: the largest one, as the step gets it, and cut to other sizes."""

from __future__ import annotations

from typing import Any

import torch

from memfit.integrations.batches import can_look_ahead
from memfit.integrations.lightning.framework import part_of
from memfit.live_state import LiveState
from memfit.runtime.largest_batch import largest_batch
from memfit.session.deterministic_draws import untouched_randomness

MOST_SECONDS = 10.0
"""Reading samples to find the largest may take so long."""


def largest_training_batch(trainer: Any) -> Any:
    """Build the largest batch of the training data, where the step will see it; None if unknown.

    What a data set changes when it is read is put back, and so are all random states.
    """
    loaders = trainer.fit_loop._combined_loader
    if loaders is None or not all(map(can_look_ahead, loaders.flattened)):
        return None
    before = LiveState({"data": [*loaders.flattened]}).snapshot()
    try:
        found = [largest_batch(each, most_seconds=MOST_SECONDS).batch for each in loaders.flattened]
        batch = torch.utils._pytree.tree_unflatten(found, loaders._spec)
        with untouched_randomness():
            return on_device(trainer, batch)
    finally:
        before.restore()


def on_device(trainer: Any, batch: Any) -> Any:
    """Do to a batch what Lightning's loop does before the step: convert it and move it."""
    call: Any = part_of(trainer, "trainer.call")
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
