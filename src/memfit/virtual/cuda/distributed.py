"""Data-parallel training as one of its processes sees it, on the virtual card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from memfit.units import MIB

_OF_A_GROUP = ("init_process_group", "destroy_process_group", "get_rank", "get_world_size")
_FIRST_BUCKET_BYTES = MIB
_BUCKET_MIB = 25
"""dist._DEFAULT_FIRST_BUCKET_BYTES and bucket_cap_mb of DistributedDataParallel, torch 2.13."""


def _wrap(
    wrapper: Any,
    module: torch.nn.Module,
    *_args: Any,
    gradient_as_bucket_view: bool = False,
    **options: Any,
) -> None:
    """Stand in for the constructor of ``DistributedDataParallel``: keep the module, make buckets.

    The buckets take as much as all gradients together, unless the gradients are views of them
    (``gradient_as_bucket_view``). Does not account for what NCCL takes outside torch, nor for the
    second set of buckets while they are rebuilt after the first step.

    Source: torch/nn/parallel/distributed.py, torch 2.13; torch/csrc/distributed/c10d/reducer.cpp.
    """
    torch.nn.Module.__init__(wrapper)
    wrapper.module = module
    cap_bytes = int((options.get("bucket_cap_mb") or _BUCKET_MIB) * MIB)
    wrapper.buckets = [] if gradient_as_bucket_view else list(_buckets(module, cap_bytes))


def _forward(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the module."""
    return wrapper.module(*args, **kwargs)


def _no_sync(_wrapper: torch.nn.Module) -> AbstractContextManager[None]:
    """Keep gradients to this process for a while, which changes no memory."""
    return nullcontext()


def _buckets(module: torch.nn.Module, cap_bytes: int) -> Iterator[torch.Tensor]:
    """Make the buckets: parameters in reverse order, the first bucket small.

    Source: ``compute_bucket_assignment_by_size`` in torch/csrc/distributed/c10d/reducer.cpp.
    """
    limit_bytes, num_elements = _FIRST_BUCKET_BYTES, 0
    last: torch.Tensor | None = None
    for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
        last = parameter
        num_elements += parameter.numel()
        if num_elements * parameter.element_size() >= limit_bytes:
            yield parameter.new_empty(num_elements)
            limit_bytes, num_elements = cap_bytes, 0
    if last is not None and num_elements:
        yield last.new_empty(num_elements)


def distributed() -> Iterator[Any]:
    """Yield the replacements with which data-parallel code runs as one virtual process.

    A group that is open already stays, and so does torch's fake one, whose ranks are not there.
    """
    if not torch.distributed.is_available():
        return
    parallel = torch.nn.parallel.DistributedDataParallel
    for name, method in {"__init__": _wrap, "forward": _forward, "no_sync": _no_sync}.items():
        yield patch.object(parallel, name, method)
    if torch.distributed.is_initialized():
        return
    group = _Group()
    yield group.closed_at_the_end()
    answers = {
        "init_process_group": group.begin,
        "destroy_process_group": group.end,
        "is_initialized": lambda: group.is_open,
        "barrier": _nothing,
        "broadcast": _nothing,
        "all_reduce": _nothing,
        "get_rank": group.rank,
        "get_world_size": group.num_ranks,
    }
    for name, answer in answers.items():
        yield patch.object(torch.distributed, name, answer)


class _Group:
    """The process group of one process."""

    def __init__(self) -> None:
        self.is_open = False
        self._torchs_own: Any = None
        self._parts = {name: getattr(torch.distributed, name) for name in _OF_A_GROUP}

    def begin(self, backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Open the group; nobody else has to come."""
        if backend == "fake":
            self._parts["init_process_group"](backend, *args, **kwargs)
            self._torchs_own = self._parts
        self.is_open = True

    def end(self, *args: Any, **kwargs: Any) -> None:
        """Close the group."""
        if self._torchs_own is not None:
            self._torchs_own["destroy_process_group"](*args, **kwargs)
        self.is_open, self._torchs_own = False, None

    def rank(self, *args: Any, **kwargs: Any) -> int:
        """Return the rank of this process."""
        return 0 if self._torchs_own is None else int(self._torchs_own["get_rank"](*args, **kwargs))

    def num_ranks(self, *args: Any, **kwargs: Any) -> int:
        """Count the ranks."""
        own = self._torchs_own
        return 1 if own is None else int(own["get_world_size"](*args, **kwargs))

    @contextmanager
    def closed_at_the_end(self) -> Iterator[None]:
        """Close a group of torch's that was opened inside."""
        try:
            yield
        finally:
            self.end()


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Exchange nothing: collectives in place take no memory of torch's."""
