"""Lists the memory behind a job's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from memfit.trace.recorder import Owned


def storages_of(owned: Iterable[Owned]) -> Iterator[tuple[Owned, torch.UntypedStorage]]:
    """Yield every storage behind tensors once, with the first that lies in it."""
    seen: set[int] = set()
    for entry in owned:
        for part in _parts(entry.tensor):
            storage = part.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                yield entry, storage


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Give the tensors that a sparse one consists of, or the tensor itself."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    return (tensor,)
