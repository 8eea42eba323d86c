"""Data-parallel training as one of its processes sees it, on the virtual card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from memfit.errors import RecordingError
from memfit.virtual.process_group import SAY_RANKS, check_is_alone

_OF_A_GROUP = ("init_process_group", "destroy_process_group", "get_rank", "get_world_size")


def distributed() -> Iterator[Any]:
    """Yield the replacements with which data-parallel code runs as one virtual process.

    A group that is open already stays, and so does torch's fake one, whose ranks are not there.
    """
    if not torch.distributed.is_available():
        return
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
    kind = torch.distributed.device_mesh.DeviceMesh
    yield patch.object(kind, "__init__", group.mesh(kind.__init__))


class _Group:
    """The process group of one process."""

    def __init__(self) -> None:
        self.is_open = False
        self._torchs_own: Any = None
        self._parts = {name: getattr(torch.distributed, name) for name in _OF_A_GROUP}

    def begin(self, backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Open the group; nobody else has to come.

        Raises:
            RecordingError: if it is of several ranks.
        """
        check_is_alone(backend, *args, **kwargs)
        if backend == "fake":
            self._parts["init_process_group"](backend, *args, **kwargs)
            self._torchs_own = self._parts
        self.is_open = True

    def end(self, *args: Any, **kwargs: Any) -> None:
        """Close the group."""
        if self._torchs_own is not None:
            self._torchs_own["destroy_process_group"](*args, **kwargs)
        self.is_open, self._torchs_own = False, None

    def mesh(self, init: Any) -> Any:
        """Return what refuses ranks laid out as a mesh, but for torch's fake ones."""

        def checked(*args: Any, **kwargs: Any) -> None:
            if self._torchs_own is None:
                remedy = f"{SAY_RANKS} A script that does so cannot be predicted: write a Job."
                raise RecordingError("it lays out ranks as a mesh, as fully_shard does", remedy)
            init(*args, **kwargs)

        return checked

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
