"""Has data loaders fetch in this process what their workers would fetch in theirs."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from memfit.trace.origins import line_of_user
from memfit.trace.purposes import tell_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a script asks a loader for: its next batch."""

    source: object
    """The loader's data set."""
    num_batches: int | None = None
    """Of an epoch; None where the data has no known length."""
    ends_loop: bool = True
    """Whether a loop ends with the data, rather than a ``next`` that raises."""


class Reader(Protocol):
    """Follows what loaders are asked for, and may give something else."""

    def instead(self, iterator: Any, fetch: Callable[[Any], Any]) -> tuple[Any] | None:
        """Return a batch in the place of the next one, alone in a tuple; None leaves it."""
        ...

    def fetched(self, iterator: Any, batch: Any) -> None:
        """Hear of a batch that was given."""
        ...


def loaders_in_process(
    elsewhere: Callable[[], AbstractContextManager[None]],
    may_fetch: Callable[[Asked], bool],
    reader: Reader | None = None,
    received: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Iterator[Any]:
    """Yield what replaces the workers of data loaders, which cannot see fake tensors.

    Samples and batches are real work of the host either way. What a worker makes lies in its own
    process. Its batches come through shared memory, which the allocator of this process reports
    while they live (``MapAllocator`` in aten/src/ATen/MapAllocator.cpp, torch 2.13).

    Limits: batches that come before their turn, as where one worker is slower than another, are
    not counted: how many there are is a matter of time.

    Args:
        elsewhere: entered around what a worker would do.
        may_fetch: asked before each batch; if not, the loader's data has ended.
        reader: sees every batch, and may give others.
        received: makes a tensor of this process of one that a worker sent; None leaves it.
    """
    ended = _ending(_BaseDataLoaderIter.__next__, may_fetch, reader)
    yield patch.object(_BaseDataLoaderIter, "__next__", ended)

    class InProcess(_SingleProcessDataLoaderIter):
        """Fetch batches in this process, as a worker would."""

        def _next_data(self) -> Any:
            with elsewhere():
                batch = super()._next_data()
            return batch if received is None else tree_map_only(torch.Tensor, received, batch)

    def iterator(loader: DataLoader[Any]) -> _BaseDataLoaderIter:
        if loader.num_workers == 0:
            return _SingleProcessDataLoaderIter(loader)
        # The iterator of this process insists on a loader without workers and without a timeout.
        return _unpinned(_as_if_without_workers(loader, InProcess))

    yield patch.object(DataLoader, "_get_iterator", iterator)
    # Its warning about the number of cores is about this machine, not about the one asked for.
    yield patch.object(DataLoader, "check_worker_number_rationality", _say_nothing)


def _ending(
    fetch: Callable[[Any], Any], may_fetch: Callable[[Asked], bool], reader: Reader | None
) -> Callable[[Any], Any]:
    def fetch_if_it_may(iterator: Any) -> Any:
        given = None if reader is None else reader.instead(iterator, fetch)
        if given is not None:
            return tell_batch(given[0], line_of_user())
        if not may_fetch(_asked(iterator, ends_loop=_ends_loop(sys._getframe(1)))):
            raise StopIteration
        batch = fetch(iterator)
        if reader is not None:
            reader.fetched(iterator, batch)
        return tell_batch(batch, line_of_user())

    return fetch_if_it_may


def _asked(iterator: Any, *, ends_loop: bool) -> Asked:
    try:
        num_batches = len(iterator)
    except TypeError:
        num_batches = None  # a data set without a length, or its sampler
    return Asked(source=iterator._dataset, num_batches=num_batches, ends_loop=ends_loop)


def _ends_loop(frame: FrameType) -> bool:
    """Return whether what asks an iterator in a frame ends with it: a ``for``, or a generator."""
    code = frame.f_code
    if code.co_flags & inspect.CO_GENERATOR:
        return True
    return dis.opname[code.co_code[frame.f_lasti]] == "FOR_ITER"


def _as_if_without_workers(
    loader: DataLoader[Any], make: Callable[[DataLoader[Any]], _BaseDataLoaderIter]
) -> _BaseDataLoaderIter:
    """Make the iterator of a loader whose settings say that there are workers."""
    settings: dict[str, Any] = vars(loader)
    hidden = {name: settings[name] for name in ("num_workers", "timeout") if name in settings}
    for name in hidden:
        settings[name] = 0
    try:
        return make(loader)
    finally:
        settings.update(**hidden)


def _unpinned(iterator: _BaseDataLoaderIter) -> _BaseDataLoaderIter:
    """Leave out the copy into pinned memory: what a worker sends is dropped once it is made."""
    iterator._pin_memory = False
    return iterator


def _say_nothing(_loader: DataLoader[Any]) -> None:
    """Give no advice."""
