"""The storages that are alive, each with the allocation of a trace that it stands for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from memfit.trace.lent_memory import memory_of


@dataclass(slots=True)
class Live:
    """A storage that is alive: its number of bytes, its place in the trace and its death watch."""

    num_bytes: int
    index: int
    watch: weakref.ref[Any]
    is_a_modules: bool
    """Whether a module was running when it was made."""


class LiveStorages:
    """Know what is alive, and tell of whatever ends.

    Args:
        tell_ended: is given the allocation of a storage that has died.
    """

    def __init__(self, tell_ended: Callable[[int], None]) -> None:
        self._tell_ended = tell_ended
        self._of_key: dict[int, Live] = {}

    def of(self, tensor: torch.Tensor) -> Live | None:
        """Return what is known of a tensor's memory; None if that is nothing."""
        return self._of_key.get(memory_of(tensor)._cdata)

    def of_storage(self, storage: torch.UntypedStorage) -> Live | None:
        """Return what is known of a storage."""
        return self._of_key.get(storage._cdata)

    def of_key(self, key: int) -> Live | None:
        """Return what is known of a storage by its key; None if it has ended."""
        return self._of_key.get(key)

    def allocations(self) -> set[int]:
        """Return the allocations of all that is alive."""
        return {live.index for live in self._of_key.values()}

    def allocations_of(self, tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
        """Return the allocations that known tensors lie in, each once."""
        found: dict[int, None] = {}
        for tensor in tensors:
            live = self._of_key.get(memory_of(tensor)._cdata)
            if live is not None:
                found[live.index] = None
        return tuple(found)

    def add(self, storage: torch.UntypedStorage, index: int, *, is_a_modules: bool = False) -> int:
        """Have a storage stand for an allocation until it dies; return its key."""
        key: int = storage._cdata
        watch = weakref.ref(storage, lambda _: self.end(key))
        self._of_key[key] = Live(storage.nbytes(), index, watch, is_a_modules)
        return key

    def end(self, key: int) -> None:
        """Forget a storage, and tell that it has ended."""
        live = self._of_key.pop(key, None)
        if live is not None:
            self._tell_ended(live.index)
