"""Batches of a framework's loaders: counted, and cut or repeated to other sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset

from memfit.errors import MemfitError
from memfit.session.leaves import leaves_of


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


class Resized:
    """Give a batch in any number of samples.

    Args:
        batch: a real one; the walks over a job's objects leave it alone.
        of_size: gives a batch of another number of samples.
    """

    def __init__(self, batch: Any, of_size: Callable[[Any, int], Any] = resized) -> None:
        self._batch, self._of_size = batch, of_size

    def __call__(self, batch_size: int) -> Any:
        """Return so many samples."""
        return self._of_size(self._batch, batch_size)


def can_look_ahead(loader: Any) -> bool:
    """Return whether reading a loader's samples by their number takes none from the training."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def pieces_of(batch: Any, most_samples: int) -> Iterator[Any]:
    """Yield the samples of a batch, so many at a time."""
    rows = num_rows(batch)
    for start in range(0, rows, most_samples):
        count = min(most_samples, rows - start)

        def piece(tensor: torch.Tensor, start: int = start, count: int = count) -> torch.Tensor:
            is_of_samples = tensor.dim() > 0 and tensor.shape[0] == rows
            return tensor.narrow(0, start, count) if is_of_samples else tensor

        yield tree_map_only(torch.Tensor, piece, batch)
