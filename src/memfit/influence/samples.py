"""Samples that can be asked for by their numbers, so that a scan cuts batches as memory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from memfit.errors import JobError


@dataclass(frozen=True, kw_only=True)
class Samples:
    """A number of samples, and what makes a batch of some of them.

    Example:
        >>> samples = Samples.of(torch.arange(10.0))
        >>> samples.batch(torch.tensor([2, 5]))
        tensor([2., 5.])
    """

    count: int
    """How many there are."""
    batch: Callable[[Tensor], Any]
    """Make a batch: rows (B,) int64, in rising order, to a pytree whose samples are in that order.
    The same rows always give the same samples."""

    @classmethod
    def of(cls, source: Any) -> Self:
        """Take samples from what people have.

        Args:
            source: ``Samples``; a DataLoader, of which the data set and the collation are taken,
                not the order; a data set with a length; or a pytree of tensors whose first
                dimensions are the samples.

        Raises:
            JobError: if it is something else, or has no order.
        """
        if isinstance(source, cls):
            return source
        if isinstance(source, DataLoader):
            return cls._of_dataset(source.dataset, source.collate_fn)
        if isinstance(source, Dataset):
            return cls._of_dataset(source, default_collate)
        leaves = tree_leaves(source)
        if not leaves or not all(isinstance(each, Tensor) and each.dim() for each in leaves):
            msg = (
                f"Samples cannot be taken from {type(source).__name__}. Needed are a pytree of "
                "tensors whose first dimensions are the samples, a data set with a length, a "
                "DataLoader, or influence.Samples(count=…, batch=…)."
            )
            raise JobError(msg)
        lengths = {len(each) for each in leaves}
        if len(lengths) > 1:
            msg = (
                f"The tensors have {sorted(lengths)} entries in their first dimensions; needed is "
                "the same number of samples in each."
            )
            raise JobError(msg)
        return cls(
            count=lengths.pop(),
            batch=lambda rows: tree_map_only(Tensor, lambda each: each[rows], source),
        )

    @classmethod
    def _of_dataset(cls, dataset: Any, collate: Callable[[list[Any]], Any]) -> Self:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            msg = (
                f"{type(dataset).__name__} has no length or no order, so that its samples have no "
                "numbers. Needed is a data set with __len__ and __getitem__."
            )
            raise JobError(msg)
        return cls(
            count=len(dataset),
            batch=lambda rows: collate([dataset[row] for row in rows.tolist()]),
        )

    def subset(self, rows: Sequence[int] | Tensor) -> Self:
        """Return some of the samples, which are numbered anew.

        Raises:
            JobError: if there is no such sample.
        """
        chosen = torch.as_tensor(rows, dtype=torch.int64)
        wrong = chosen[(chosen < 0) | (chosen >= self.count)]
        if len(wrong):
            msg = f"There is no sample {int(wrong[0])}; there are {self.count}, from 0."
            raise JobError(msg)
        return type(self)(count=len(chosen), batch=lambda given: self.batch(chosen[given]))

    def chunks(self, num_each: int) -> list[range]:
        """Return the numbers of all samples, so many at a time."""
        starts = range(0, self.count, num_each)
        return [range(start, min(start + num_each, self.count)) for start in starts]

    def spread(self, number: int) -> Tensor:
        """Return the numbers of a few samples from the first to the last."""
        last, number = self.count - 1, min(number, self.count)
        return torch.tensor(
            sorted({round(place * last / max(1, number - 1)) for place in range(number)})
        )
