"""Finds out which dimension of a batch counts samples, and cuts batches along it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
)

from memfit.errors import (
    BatchSizeIgnoredError,
    JobError,
    JobFunctionError,
    RecordingError,
    UsageError,
)
from memfit.job import Job, expected_signature
from memfit.session.borrowing import BATCH, left_alone
from memfit.session.leaves import is_plain_list, leaves_of
from memfit.virtual.tensors import as_virtual, virtual_tensors


@dataclass(frozen=True, slots=True)
class BatchDim:
    """Where a tensor or list of a batch counts samples: the dimension, its entries per sample."""

    dim: int
    per_sample: int
    is_of_numbers: bool = False
    """Whether it is a list of numbers of the samples, such as lengths."""


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """How a job's batches are laid out; one entry per leaf, None for leaves without samples."""

    spec: TreeSpec
    dims: tuple[BatchDim | None, ...]

    def num_samples(self, batch: Any) -> int:
        """Count the samples of a batch by its first leaf that has them."""
        leaves = self._leaves(batch)
        for leaf, place in zip(leaves, self.dims, strict=True):
            if place is not None:
                return _extents(leaf)[place.dim] // place.per_sample
        raise AssertionError("a layout has at least one batch dimension")

    def split(self, batch: Any, micro_batch_size: int) -> Iterator[tuple[Any, int]]:
        """Yield micro-batches, as views, with their numbers of samples; the last may be smaller."""
        num_samples = self.num_samples(batch)
        if micro_batch_size >= num_samples:
            yield batch, num_samples
            return
        starts = [*range(0, num_samples, micro_batch_size), num_samples]
        yield from self._cut(batch, starts)

    def split_evenly(self, batch: Any, num_pieces: int) -> Iterator[tuple[Any, int]]:
        """Yield so many micro-batches, as views, whose numbers of samples differ by one at most."""
        num_samples = self.num_samples(batch)
        starts = [num_samples * number // num_pieces for number in range(num_pieces + 1)]
        yield from self._cut(batch, starts)

    def part(self, batch: Any, num_parts: int, number: int) -> Any:
        """Return one of so many parts of a batch, as views; the first ones are larger by one.

        Raises:
            UsageError: if there are fewer samples than parts.
        """
        num_samples = self.num_samples(batch)
        if num_samples < num_parts:
            raise UsageError(
                f"A batch of {num_samples} sample(s) has no part for each of {num_parts} ranks."
            )
        least, rest = divmod(num_samples, num_parts)
        start = number * least + min(number, rest)
        ((piece, _),) = self._cut(batch, [start, start + least + (number < rest)])
        return piece

    def _cut(self, batch: Any, starts: Sequence[int]) -> Iterator[tuple[Any, int]]:
        leaves = self._leaves(batch)
        for start, end in pairwise(starts):
            count = end - start
            pieces = [
                leaf if place is None else _part_of(leaf, place, start, count)
                for leaf, place in zip(leaves, self.dims, strict=True)
            ]
            yield tree_unflatten(pieces, self.spec), count

    def name_of(self, leaf: int) -> str:
        """Name a leaf as Python would reach it: ``batch['labels']``."""
        numbered = tree_unflatten([*range(len(self.dims))], self.spec)
        paths = {number: path for path, number in tree_flatten_with_path(numbered)[0]}
        return f"batch{keystr(paths[leaf])}"

    def leaf_of(self, batch: Any, leaf: int) -> Any:
        """Return a leaf of a batch by its number."""
        return self._leaves(batch)[leaf]

    def _leaves(self, batch: Any) -> list[Any]:
        leaves = leaves_of(_in_order(batch, self.spec))
        if len(leaves) != len(self.dims):
            _, spec = tree_flatten(batch, is_leaf=is_plain_list)
            raise JobFunctionError(
                "batch",
                expected_signature("batch"),
                f"a training batch has {len(leaves)} parts ({spec}), batch() gives {self.spec}",
            )
        return leaves


def _in_order(batch: Any, spec: TreeSpec) -> Any:
    """Bring the keys of dictionaries into the order in which the job's own batches have them.

    Leaves are told apart by their place, so the same keys in another order would be taken for each
    other.

    Raises:
        JobFunctionError: if there are as many keys, and some have other names.
    """
    if spec.type is not dict or type(batch) is not dict:
        return batch
    keys = spec.context
    children = dict(zip(keys, spec.children(), strict=True))
    if batch.keys() != children.keys():
        if len(batch) != len(children):
            return batch  # their number is refused
        found = (
            f"a training batch has {sorted(batch, key=str)}, batch() gives {sorted(keys, key=str)}"
        )
        raise JobFunctionError("batch", expected_signature("batch"), found)
    if list(batch) == keys and not any(child.type is dict for child in children.values()):
        return batch
    return {key: _in_order(batch[key], child) for key, child in children.items()}


def find_layout(job: Job) -> BatchLayout:
    """Compare batches of two sizes to see which dimension of each tensor follows the batch size.

    Raises:
        JobError: if it is no job.
        BatchSizeIgnoredError: if no dimension does.
        JobFunctionError: if the batch function fails.
    """
    if not isinstance(job, Job):
        msg = (
            f"A memfit.Job is needed, not a {type(job).__name__}: memfit.Job(model=..., batch=..., "
            "loss=..., optimizer=..., batch_size=...), the first four of them functions. "
            "memfit.predict_step takes a function that builds a step."
        )
        raise JobError(msg)
    size = job.batch_size
    other = size - 1 if size > 1 else size + 1
    batch = shapes_of(job, size)
    leaves, spec = tree_flatten(batch, is_leaf=is_plain_list)
    others = leaves_of(shapes_of(job, other))
    if len(leaves) != len(others):
        raise JobFunctionError(
            "batch",
            expected_signature("batch"),
            f"batch({size}) has {len(leaves)} parts and batch({other}) has {len(others)}, so that "
            "samples have tensors of their own",
            "Put them into one tensor, padded or joined, with a list of lengths beside it.",
        )
    dims = tuple(
        _batch_dim(leaf, its_other, size, other)
        for leaf, its_other in zip(leaves, others, strict=True)
    )
    if not any(dims):
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves if _is_tensor(leaf))
        raise BatchSizeIgnoredError(
            (size, other), shapes or f"a {type(batch).__name__} in which no tensor is found"
        )
    return BatchLayout(spec, dims)


def shapes_of(job: Job, batch_size: int) -> Any:
    """Build a batch of fake tensors, without memory where the batch function allows it."""
    try:
        with left_alone(job, copies_content=False, only=[BATCH]), virtual_tensors() as mode:
            return as_virtual(mode, job.batch(batch_size))
    except RecordingError:
        # The function looks at values: it has to be run for real.
        with left_alone(job, only=[BATCH]):
            batch = real_batch(job, batch_size)
        with virtual_tensors() as mode:
            return as_virtual(mode, batch)
    except Exception as error:
        raise _batch_failed(error, batch_size) from error


def is_made_without_values(job: Job) -> bool:
    """Return whether batches can be made of shapes alone, so that large ones take no memory."""
    try:
        with left_alone(job, copies_content=False, only=[BATCH]), virtual_tensors():
            job.batch(job.batch_size)
    except RecordingError:
        return False
    except Exception as error:
        raise _batch_failed(error, job.batch_size) from error
    return True


def real_batch(job: Job, batch_size: int) -> Any:
    """Build a real batch.

    Raises:
        JobFunctionError: if the batch function fails.
    """
    try:
        return job.batch(batch_size)
    except Exception as error:
        raise _batch_failed(error, batch_size) from error


def _batch_failed(error: Exception, batch_size: int) -> JobFunctionError:
    reason = f"batch({batch_size}) raised {type(error).__name__}: {error}"
    return JobFunctionError("batch", expected_signature("batch"), reason)


def _batch_dim(leaf: Any, other: Any, batch_size: int, other_batch_size: int) -> BatchDim | None:
    """Find the first dimension whose extent is a fixed multiple of the batch size."""
    extents, others = _extents(leaf), _extents(other)
    if len(extents) != len(others):
        return None
    for dim, (extent, other_extent) in enumerate(zip(extents, others, strict=True)):
        is_ragged = not isinstance(extent, int)  # rows of a nested tensor
        if not is_ragged and extent != other_extent and extent % batch_size == 0:
            per_sample = extent // batch_size
            if per_sample * other_batch_size == other_extent:
                numbers = () if _is_tensor(leaf) else (int, float)
                holds = any(isinstance(each, numbers) for each in tree_leaves(leaf))
                return BatchDim(dim, per_sample, is_of_numbers=holds)
    return None


def _extents(leaf: Any) -> Sequence[int]:
    """Return how long a leaf is in each dimension; a list has one, a number or text none."""
    return leaf.shape if _is_tensor(leaf) else [len(leaf)] if is_plain_list(leaf) else []


def _part_of(leaf: Any, place: BatchDim, start: int, count: int) -> Any:
    """Cut samples out of a leaf."""
    start, count = start * place.per_sample, count * place.per_sample
    return leaf.narrow(place.dim, start, count) if _is_tensor(leaf) else leaf[start : start + count]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
