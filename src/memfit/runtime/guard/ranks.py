"""What ranks tell each other before anyone goes on, so that all do the same and nobody waits.

Ranks talk over a group of their own (gloo, on the host), never over the one that training uses,
which may be stuck: a rank that has run out of memory does not come to the exchange that the others
wait in. It leaves training's group, which ends their wait, and all of them make that group anew.
"""

from __future__ import annotations

import gc
import sys
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from memfit.errors import OtherRankError
from memfit.observe.out_of_memory import chain_of
from memfit.observe.starting import rank_here
from memfit.runtime.shards.connections import connections, note_connections_of_guard

_PATIENCE = timedelta(minutes=30)
"""How long a rank waits for one that does something else, such as validating. A rank that has died
is noticed at once."""
_MOST_VALUES = 8
_LOST_PEER_TEXTS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "application timeout",
    "socket timeout",
    "timed out waiting",
    "nccl communicator was aborted",
    "remote process exited or there was a network error",
)
"""In lower case; what gloo and NCCL say once another rank has left the group."""


class Ranks(Protocol):
    """Tell all ranks something, and hear what they tell."""

    rank: int
    num_ranks: int
    has_left: bool
    """Whether training's group was left and not made anew."""
    meets_in_update: bool
    """Whether updates talk over training's group, as to clip the gradients of shards does."""

    def exchange(self, *values: int) -> list[tuple[int, ...]]:
        """Return what every rank has said; all have to say equally many values."""

    def begin_step(self) -> None:
        """Count from here what training's group is used for."""

    def note_training(self) -> None:
        """Note whether training's group was used since the step began."""

    def leave_training(self, *, for_sure: bool = False) -> None:
        """Leave training's group, which ends the others' wait in it.

        Nothing is left where steps do not use that group, unless ``for_sure``.
        """

    def join_training(self) -> None:
        """Make training's group anew; every rank has to."""


class Alone:
    """Be the only rank."""

    rank = 0
    num_ranks = 1
    has_left = False
    meets_in_update = False

    def exchange(self, *values: int) -> list[tuple[int, ...]]:
        """Return what was said."""
        return [values]

    def begin_step(self) -> None:
        """Count nothing."""

    def note_training(self) -> None:
        """Note nothing."""

    def leave_training(self, *, for_sure: bool = False) -> None:
        """Leave nothing."""

    def join_training(self) -> None:
        """Join nothing."""


class JoinedRanks:
    """Be one rank of those in torch's default process group.

    Groups that are held on to, such as those of ``torch.distributed.new_group``, do not outlive
    ``leave_training``; that is not called while only memfit itself uses training's group.
    """

    meets_in_update = False

    def __init__(self) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        # There is no public way to the store, and another one would need a port of its own.
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._backend = dist.get_backend()
        # Names in the store are used once; every rank counts its runs alike.
        self._number = self._store.add(f"memfit-runs-{self.rank}", 1)
        self._num_rejoined = 0
        self._num_exchanges = _num_exchanges()
        self._is_used = True
        """Whether steps talk over training's group: taken for granted until one was seen whole."""
        self.has_left = False
        self._said = np.zeros((self.num_ranks, _MOST_VALUES), dtype=np.int64)
        self._said_tensor = torch.from_numpy(self._said)
        _meet(self._backend)
        before = connections().keys()
        self._loss = ""
        self._group: Any = dist.ProcessGroupGloo(
            self._store_for("guard"), self.rank, self.num_ranks, _PATIENCE
        )
        note_connections_of_guard(before)

    def exchange(self, *values: int) -> list[tuple[int, ...]]:
        """Return what every rank has said.

        Raises:
            OtherRankError: if a rank has died, now or in an exchange before.
        """
        if self._group is None:
            raise OtherRankError(self._loss)
        # A sum in place allocates nothing: memory is what may be short.
        self._said[:] = 0
        self._said[self.rank, : len(values)] = values
        try:
            self._group.allreduce([self._said_tensor]).wait()
        except RuntimeError as error:
            self._group = None  # the others are not to wait for this rank
            self._loss = str(error).partition("\n")[0]
            raise OtherRankError(self._loss) from error
        return [tuple(row) for row in self._said[:, : len(values)].tolist()]

    def begin_step(self) -> None:
        """Count from here what training's group is used for."""
        self._num_exchanges = _num_exchanges()

    def note_training(self) -> None:
        """Note whether the step has used training's group."""
        self._is_used = _num_exchanges() > self._num_exchanges

    def leave_training(self, *, for_sure: bool = False) -> None:
        """Leave the group, if steps use it."""
        if (self._is_used or for_sure) and not self.has_left:
            self.has_left = True
            self._leave()

    def join_training(self) -> None:
        """Make the group anew over the same store, under another name."""
        self.leave_training(for_sure=True)
        self.has_left = False
        self._join()

    def _leave(self) -> None:
        _forget_default_arguments()
        # Connections are closed once nothing holds the group, tracebacks included.
        gc.collect()
        dist.destroy_process_group()
        gc.collect()

    def _join(self, timeout: timedelta | None = None) -> None:
        self._num_rejoined += 1
        dist.init_process_group(
            self._backend,
            timeout=timeout,
            store=self._store_for(f"again-{self._num_rejoined}"),
            rank=self.rank,
            world_size=self.num_ranks,
        )

    def _store_for(self, name: str) -> Any:
        return dist.distributed_c10d.PrefixStore(f"memfit-{self._number}-{name}", self._store)


def _meet(backend: str) -> None:
    """Notice a rank that has gone already, for which a new group would wait half an hour.

    Raises:
        OtherRankError: if there is one.
    """
    if backend != "gloo":
        return
    try:
        dist.barrier()
    except RuntimeError as error:
        raise OtherRankError(str(error).partition("\n")[0]) from error


def ranks_here() -> Ranks:
    """Return the ranks of torch's default process group, or this process alone."""
    return JoinedRanks() if rank_here()[1] > 1 else Alone()


def has_lost_peer(error: BaseException) -> bool:
    """Return whether an error tells that another rank has left an exchange."""
    said = [str(each).lower() for each in chain_of(error) if isinstance(each, RuntimeError)]
    return any(text in each for each in said for text in _LOST_PEER_TEXTS)


def _forget_default_arguments() -> None:
    """Let go of the group where torch holds it as the default argument of functions.

    They are defined as ``group=group.WORLD`` (torch/distributed/nn/functional.py, read at 2.13),
    which is the group itself if they are first imported after it was made; None means the same.
    """
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in [] if module is None else vars(module).values():
        defaults = getattr(function, "__defaults__", None)
        if isinstance(defaults, tuple) and any(each is dist.group.WORLD for each in defaults):
            function.__defaults__ = tuple(
                None if each is dist.group.WORLD else each for each in defaults
            )


def _num_exchanges() -> int:
    """Count what training's group was used for."""
    group: Any = dist.group.WORLD  # the method has no annotation
    return 0 if group is None else int(group._get_sequence_number_for_group())
