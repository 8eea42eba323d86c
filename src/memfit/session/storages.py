"""Lists the memory behind a job's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memfit.allocator.simulate import CPU_RULES, CUDA_RULES
from memfit.job import Job
from memfit.trace.events import Category
from memfit.trace.origins import line_of_function
from memfit.trace.owners import Owned
from memfit.trace.subclasses import known_parts_of


def owned_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any
) -> Iterator[Owned]:
    """Yield every tensor of a training whose purpose is known."""
    for name, parameter in model.named_parameters():
        yield from Owned.with_parameter(parameter, optimizer, name.rpartition(".")[0])
    for name, buffer in model.named_buffers():
        yield Owned(buffer, Category.BUFFERS, name.rpartition(".")[0])
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            yield Owned(leaf, Category.BATCH, "")


def with_lines_of(job: Job, owned: Iterable[Owned]) -> Iterator[Owned]:
    """Yield tensors of a job's with the lines of the functions that gave them, if none is known."""
    lines = {
        Category.PARAMETERS: line_of_function(job.model),
        Category.BUFFERS: line_of_function(job.model),
        Category.OPTIMIZER_STATE: line_of_function(job.optimizer),
        Category.BATCH: line_of_function(job.batch),
    }
    for each in owned:
        line = "" if each.source_line else lines.get(each.category, "")
        yield replace(each, source_line=line) if line else each


def storages_of(owned: Iterable[Owned]) -> Iterator[tuple[Owned, torch.UntypedStorage]]:
    """Yield every storage behind tensors once, with the first that lies in it.

    Limits: of wrappers that do not say what they are made of, nothing is known.
    """
    seen: set[int] = set()
    for entry in owned:
        for part in known_parts_of(entry.tensor):
            storage = part.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                yield entry, storage


def owned_bytes(owned: Iterable[Owned]) -> dict[Category, int]:
    """Add up the bytes of a job's tensors by category, each storage once.

    On a GPU, what lies in the host's memory is left out, except for the batch, which may not have
    been moved yet.
    """
    entries = [*owned]
    is_on_gpu = any(entry.tensor.is_cuda for entry in entries)
    rules = CUDA_RULES if is_on_gpu else CPU_RULES
    found: dict[Category, int] = {}
    for entry, storage in storages_of(entries):
        is_elsewhere = is_on_gpu and not entry.tensor.is_cuda
        if entry.category is Category.BATCH or not is_elsewhere:
            found[entry.category] = found.get(entry.category, 0) + rules.rounded(storage.nbytes())
    return found
