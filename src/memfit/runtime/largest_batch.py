"""Finds the largest batch that a data loader can give, to try it before the others."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from memfit.errors import MemfitError
from memfit.live_state.random_sources import RandomSourcesReader
from memfit.session.batch_shapes import LargestBatches, num_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The largest batch that was found, and how far it is to be trusted."""

    batch: Any
    num_samples_seen: int
    num_samples: int | None
    """None where nobody knows how many there are."""
    is_bound: bool
    """Whether no batch that the loader gives can be larger."""


def largest_batch(loader: Iterable[Any], *, most_seconds: float = 30.0) -> LargestBatch:
    """Build the largest batch that a loader can give.

    Samples are read one by one and measured by their elements; where the loader shuffles, the
    largest ones are put into one batch. What cannot be read by index is looked at batch by batch.
    Random states are as before. Not accounted for: what a dataset changes when it is read, and
    samples that are made larger by chance later.

    Raises:
        MemfitError: if the loader gives nothing.
    """
    states = RandomSourcesReader().here()
    try:
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            return _largest_by_index(loader, most_seconds)
        return _largest_seen(loader, most_seconds)
    finally:
        states.put_back()


def _largest_by_index(loader: DataLoader[Any], most_seconds: float) -> LargestBatch:
    dataset: Any = loader.dataset
    sizes: list[int] = []
    deadline = time.monotonic() + most_seconds
    for index in range(len(dataset)):
        sizes.append(num_elements(dataset[index]))
        if time.monotonic() > deadline:
            break
    if not sizes:
        msg = "The data loader has no samples, so there is no largest batch to try."
        raise MemfitError(msg)
    is_whole = len(sizes) == len(dataset)
    indices, is_bound = _chosen(loader, sizes, is_whole=is_whole)
    samples = [dataset[index] for index in indices]
    # Without batches of its own, a loader hands on what the dataset gives.
    batch = loader.collate_fn(samples[0] if loader.batch_sampler is None else samples)
    return LargestBatch(
        batch=batch,
        num_samples_seen=len(sizes),
        num_samples=len(dataset),
        is_bound=is_bound and is_whole,
    )


def _chosen(
    loader: DataLoader[Any], sizes: Sequence[int], *, is_whole: bool
) -> tuple[Sequence[int], bool]:
    """Choose the samples of the largest batch; say whether there can be no larger one."""
    sampler = loader.batch_sampler
    is_plain = type(sampler) is BatchSampler
    if is_plain and not isinstance(loader.sampler, SequentialSampler):
        largest = sorted(range(len(sizes)), key=lambda index: -sizes[index])
        return largest[: loader.batch_size or 1], True
    if sampler is None or not is_whole:
        count = loader.batch_size or 1
        return sorted(range(len(sizes)), key=lambda index: -sizes[index])[:count], False
    # Padding makes every sample as long as the longest of its batch.
    batches = [list(indices) for indices in sampler]
    largest = max(batches, key=lambda batch: len(batch) * max(sizes[index] for index in batch))
    return largest, is_plain  # another sampler may group the samples otherwise next time


def _largest_seen(loader: Iterable[Any], most_seconds: float) -> LargestBatch:
    deadline = time.monotonic() + most_seconds
    seen, num_seen, is_whole = LargestBatches(), 0, True
    for batch in loader:
        seen.look(num_seen, batch)
        num_seen += 1
        if time.monotonic() > deadline:
            is_whole = False
            break
    if seen.largest is None:
        msg = "The data loader gives no batches, so there is no largest one to try."
        raise MemfitError(msg)
    return LargestBatch(
        batch=seen.largest.batch,
        num_samples_seen=num_seen,
        num_samples=num_seen if is_whole else None,
        is_bound=False,
    )
