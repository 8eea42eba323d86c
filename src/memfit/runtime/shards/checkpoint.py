"""Saves a run as all ranks hold it, shard by shard, for the same number of ranks or another."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from memfit.errors import CheckpointError, MemfitError, MemfitWarning, OtherRankError
from memfit.files import (
    fill_atomically,
    naming_full_disk,
    remove_own_folder,
    write_atomically,
)
from memfit.observe.starting import rank_here
from memfit.runtime.guard.large_tensors import LargeTensors
from memfit.runtime.guard.ranks import has_lost_peer
from memfit.runtime.shards.kept_states import (
    RebuiltStates,
    kept_states,
    own_state,
    parameter_tensors,
    put_own_state_back,
)
from memfit.session.leaves import bytes_in
from memfit.session.session import Session

_R = TypeVar("_R")
_POINTER = "latest.json"
_WHOLE, _TENSORS = "run.pt", "tensors"
_SAVE = re.compile(r"step-\d+-\d+")
_OWN = re.compile(
    r"\.?(run|rank-\d+)\.pt(\..*\.part)?|tensors/(\.metadata(\.tmp)?|__\d+_\d+\.distcp)"
)
"""What lies in the folder of a save, also of one that was cut off."""


class ShardedCheckpoint:
    """Write a session into a folder that all ranks see, and read it back.

    Tensors are written by ``torch.distributed.checkpoint``, each shard by one rank. A save goes to
    a folder of its own below the one given; then one file is replaced that names it. A save that
    was interrupted leaves the one before whole.

    Args:
        session: whose model, optimizer and stateful parts.
        folder: of the checkpoint.
    """

    def __init__(self, session: Session, folder: str | Path) -> None:
        self._session = session
        self._folder = Path(folder)
        self._rank, self._num_ranks = rank_here()
        self._is_alone = self._num_ranks == 1

    def save(self, run: dict[str, Any]) -> None:
        """Write everything; all ranks call it.

        Args:
            run: plain values of the run itself.

        Raises:
            CheckpointError: on all ranks, if one of them could not write its part.
        """
        target = self._folder / self._new_name(run["num_steps"])
        states, described = kept_states(self._session)
        tensors = {**parameter_tensors(LargeTensors(self._session).parameters()), **states}
        whole = {"run": run, "optimizer": described}
        self._on_all(lambda: self._write_own(whole, target), "write")
        self._on_all(lambda: self._write_tensors(tensors, target), "write")
        self._on_all(lambda: self._point_to(target), "write")

    def load(self) -> dict[str, Any]:
        """Read everything; all ranks call it, as many as there are now.

        Returns:
            The plain values of the run.

        Raises:
            CheckpointError: if there is none, or it is not of this model and optimizer.
        """
        target = self._on_all(self._latest, "read")
        whole = self._on_all(lambda: _read(target / _WHOLE), "read")
        parameters = LargeTensors(self._session).parameters()
        self._check(parameters, whole["optimizer"])
        states = RebuiltStates.of(parameters, whole["optimizer"])
        wanted = {**parameter_tensors(parameters), **states.tensors}
        self._on_all(lambda: self._read_tensors(wanted, target), "read")
        states.take_up(self._session, parameters)
        state, is_own = self._on_all(lambda: self._own(target), "read")
        put_own_state_back(self._session, state, is_own=is_own)
        run: dict[str, Any] = whole["run"]
        return run

    def _read_tensors(self, wanted: dict[str, torch.Tensor], target: Path) -> None:
        with _first_failure(), _unsaid():
            load(wanted, checkpoint_id=target / _TENSORS, no_dist=self._is_alone)

    def _write_tensors(self, tensors: dict[str, torch.Tensor], target: Path) -> None:
        with naming_full_disk(target, bytes_in(tensors)), _first_failure(), _unsaid():
            save(tensors, checkpoint_id=target / _TENSORS, no_dist=self._is_alone)

    def _write_own(self, whole: dict[str, Any], target: Path) -> None:
        with naming_full_disk(target):
            target.mkdir(parents=True, exist_ok=True)
        if self._rank == 0:
            fill_atomically(target / _WHOLE, lambda file: torch.save(whole, file))
        state = own_state(self._session)
        fill_atomically(target / _own_file(self._rank), lambda file: torch.save(state, file))

    def _new_name(self, num_steps: int) -> str:
        """Return a name that no save had yet, the same on every rank."""
        number = 0
        if self._rank == 0:
            taken = [int(each.name.rpartition("-")[2]) for each in _saves_in(self._folder)]
            number = 1 + max(taken, default=0)
        return f"step-{num_steps}-{self._of_first_rank(number)}"

    def _of_first_rank(self, value: int) -> int:
        if self._is_alone:
            return value
        held = [value]
        with _naming_lost_peer():
            dist.broadcast_object_list(held, src=0)
        return held[0]

    def _point_to(self, target: Path) -> None:
        """Make a save the latest, and drop those before it."""
        if self._rank:
            return
        said = {"folder": target.name, "num_ranks": self._num_ranks}
        write_atomically(self._folder / _POINTER, json.dumps(said))
        for each in _saves_in(self._folder):
            if each != target and (foreign := remove_own_folder(each, _OWN)) is not None:
                msg = f"{each} is kept: no save has written {foreign.name}, which lies in it."
                warnings.warn(msg, MemfitWarning, stacklevel=5)

    def _latest(self) -> Path:
        path = self._folder / _POINTER
        if not path.is_file():
            msg = f"{self._folder} has no {_POINTER}, which a save that was finished leaves"
            raise FileNotFoundError(msg)
        return self._folder / str(json.loads(path.read_text())["folder"])

    def _own(self, target: Path) -> tuple[dict[str, Any], bool]:
        """Read what this rank had, else what the first had; say whether it is its own."""
        path, is_same = target / _own_file(self._rank), self._num_saved(target) == self._num_ranks
        return _read(path if path.is_file() and is_same else target / _own_file(0)), is_same

    def _num_saved(self, target: Path) -> int:
        return len([*target.glob("rank-*.pt")])

    def _check(self, parameters: Mapping[str, Any], described: Mapping[str, Any]) -> None:
        if other := sorted(parameters.keys() ^ set(described["parameters"])):
            reason = f"it is of another model: {', '.join(other[:3])} are not in both"
            raise CheckpointError("read", self._folder, reason)

    def _on_all(self, action: Callable[[], _R], verb: str) -> _R:
        """Do something on every rank.

        Raises:
            CheckpointError: if it has failed on any of them.
            OtherRankError: if one of them has died.
        """
        found, reason = None, ""
        try:
            found = action()
        except Exception as error:  # noqa: BLE001 - whatever it was, the others have to hear of it
            known = str(error) if isinstance(error, MemfitError) else ""
            reason = (known or f"{type(error).__name__}: {error}").partition("\n")[0].rstrip(".")
        said = [reason]
        if not self._is_alone:
            said = [""] * self._num_ranks
            with _naming_lost_peer():
                dist.all_gather_object(said, reason)
        for rank, each in enumerate(said):
            if each:
                raise CheckpointError(verb, self._folder, f"rank {rank}: {each}")
        return found  # type: ignore[return-value]  # it is what the action gave


@contextmanager
def _naming_lost_peer() -> Iterator[None]:
    """Say that another rank has died, in place of what its connection says."""
    try:
        yield
    except RuntimeError as error:
        if not has_lost_peer(error):
            raise
        raise OtherRankError(str(error).partition("\n")[0]) from error


@contextmanager
def _unsaid() -> Iterator[None]:
    """Keep quiet that there is one process, which is known."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


@contextmanager
def _first_failure() -> Iterator[None]:
    """Raise what failed first in place of torch's summary, which is no ``Exception``."""
    try:
        yield
    except CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        raise failure from failure.__cause__ or failure.__context__


def _saves_in(folder: Path) -> list[Path]:
    """List the folders that have the names of saves."""
    return [each for each in folder.glob("step-*-*") if _SAVE.fullmatch(each.name)]


def _own_file(rank: int) -> str:
    return f"rank-{rank:05}.pt"


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)
