"""Knows of storages that lie in the memory of another one, as those of a mapped file do."""

from __future__ import annotations

import weakref
from typing import Any

import torch

_LENT: dict[int, tuple[torch.UntypedStorage, weakref.ref[Any]]] = {}
"""By the address of a storage: the one whose memory it has, and the watch for its end."""


def lend(storage: torch.UntypedStorage, owner: torch.UntypedStorage) -> None:
    """Have a storage lie in the memory of another, which lives at least as long.

    Args:
        storage: has an address of its own, but takes no memory.
        owner: has the memory, and is what is counted.
    """
    key = storage._cdata
    _LENT[key] = (owner, weakref.ref(storage, lambda _: _LENT.pop(key, None)))


def memory_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage that has the memory in which a tensor lies."""
    storage = tensor.untyped_storage()
    lent = _LENT.get(storage._cdata)
    return storage if lent is None else lent[0]
