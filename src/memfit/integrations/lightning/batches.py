"""Batches of Lightning's loaders: the largest one, as the step gets it, and cut to other sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset

from memfit.errors import MemfitError
from memfit.integrations.lightning.framework import part_of
from memfit.live_state import LiveState
from memfit.runtime.largest_batch import largest_batch
from memfit.session.deterministic_draws import untouched_randomness
from memfit.session.leaves import leaves_of

MOST_SECONDS = 10.0
"""Reading samples to find the largest may take so long."""


def num_rows(batch: Any) -> int:
    """Count the samples of a batch: the rows of its first tensor that has any.

    Raises:
        MemfitError: if there is no tensor to be found in it.
    """
    for leaf in leaves_of(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return int(leaf.shape[0])
    msg = (
        f"The batch is a {type(batch).__name__} in which no tensor can be found, so it cannot be "
        "cut into samples. Give tensors in tuples, lists or dicts, or register the class with "
        "torch.utils._pytree.register_pytree_node."
    )
    raise MemfitError(msg)


def resized(batch: Any, num_samples: int) -> Any:
    """Return a batch of another number of samples: a part of it, or its samples over again."""
    rows = num_rows(batch)

    def of_size(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != rows or num_samples == rows:
            return tensor
        if num_samples < rows:
            return tensor.narrow(0, 0, num_samples)
        return torch.cat([tensor] * -(-num_samples // rows)).narrow(0, 0, num_samples)

    return tree_map_only(torch.Tensor, of_size, batch)


def can_look_ahead(loader: Any) -> bool:
    """Return whether reading a loader's samples by their number takes none from the training."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


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
