"""A budget that operators on the CPU run into, as they run into a card's memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memfit.trace.modes import OperatorMode
from memfit.trace.subclasses import known_parts_of
from memfit.units import format_bytes

_KNOWN_WORDS = "DefaultCPUAllocator: can't allocate memory"
"""What torch says where the host's memory ends. Code that retries with smaller batches looks for
it: accelerate 1.15 (``should_reduce_batch_size`` in utils/memory.py), with it transformers'
``auto_find_batch_size``, and Lightning 2.6 (``is_out_of_cpu_memory`` in
pytorch/utilities/memory.py)."""


class BudgetExceededError(torch.OutOfMemoryError):
    """Say which operator went over an enforced budget."""

    def __init__(
        self, message: str, *, operator: str = "", wanted_bytes: int = 0, live_bytes: int = 0
    ) -> None:
        super().__init__(message)
        self.operator = operator
        self.wanted_bytes = wanted_bytes
        self.live_bytes = live_bytes
        """Of the tensors beside it."""


class EnforcedBudget(OperatorMode):
    """Raise ``torch.OutOfMemoryError`` at the operator that brings live tensors over a budget.

    Counts the storages of the tensors that it is shown and of those that operators return, until
    they are freed. Not counted: what operators take while they run, tensors made elsewhere, and
    those without memory, such as the fake ones of a prediction.
    An operator is stopped after it has run, before anybody sees its result. Costs a Python call
    per operator; a GPU has ``torch.cuda.set_per_process_memory_fraction`` for the same.
    """

    def __init__(self, budget_bytes: int) -> None:
        super().__init__()
        self.budget_bytes = budget_bytes
        self.live_bytes = 0
        self.highest_bytes = 0
        self._live: dict[int, weakref.finalize[Any, Any]] = {}
        # Parameters outlive it, and would keep what was to be told of their end.
        weakref.finalize(self, _forget, self._live).atexit = False

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that are there already."""
        for tensor in tensors:
            for part in known_parts_of(tensor):
                self._count(part)

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        before_bytes = self.live_bytes
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        if self.budget_bytes < self.live_bytes and before_bytes < self.live_bytes:
            wanted_bytes = self.live_bytes - before_bytes
            msg = (
                f"{_KNOWN_WORDS}: out of memory: {func} wants {format_bytes(wanted_bytes)} beside "
                f"{format_bytes(before_bytes)}, over the enforced budget of "
                f"{format_bytes(self.budget_bytes)}"
            )
            raise BudgetExceededError(
                msg, operator=str(func), wanted_bytes=wanted_bytes, live_bytes=before_bytes
            )
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided:
            for part in _parts_of(tensor):
                self._count(part)
            return
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":  # fake tensors too lie there, whatever they say
            return
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._live:
            return
        self.live_bytes += num_bytes
        self.highest_bytes = max(self.highest_bytes, self.live_bytes)
        end = weakref.finalize(storage, _freed, weakref.ref(self), key, num_bytes)
        end.atexit = False
        self._live[key] = end


def _freed(whose: weakref.ref[EnforcedBudget], key: int, num_bytes: int) -> None:
    budget = whose()
    if budget is not None:
        budget._live.pop(key, None)
        budget.live_bytes -= num_bytes


def _forget(live: dict[int, Any]) -> None:
    for end in live.values():
        end.detach()


def _parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield what a tensor without a storage of its own consists of, where that is not hidden."""
    if tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
