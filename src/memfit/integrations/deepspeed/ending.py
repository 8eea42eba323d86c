"""Ends a step that fails under DeepSpeed: on every rank, with a checkpoint if it can be.

An engine cannot undo a step: gradients are spread over the ranks, and in stage 3 parameters as
well. And its groups cannot be left, since DeepSpeed holds on to them, so ranks that wait for one
that has failed learn of it from torch's store, by a thread of their own.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from memfit.errors import BatchConditionError, MemfitError, OtherRankError, StrategyError
from memfit.journal.printable import printable
from memfit.observe.out_of_memory import is_out_of_memory
from memfit.runtime.guard.ranks import has_lost_peer

_LOOK_SECONDS = 0.5
_PATIENCE_SECONDS = 30.0
"""How long a rank goes on waiting for one that has failed, before its process is ended."""
_EXIT_CODE = 4
_AGREED = (StrategyError, BatchConditionError, OtherRankError)
"""What all ranks raise together before the first pass; nothing has happened then."""
_WAIT_SECONDS = 20.0
_PART_LOOK_SECONDS = 0.2


class EngineStoppedError(MemfitError):
    """Say that a step failed under an engine, which cannot undo it, and what was saved."""

    exit_code = _EXIT_CODE

    def __init__(self, step: int, rank: int, cause: str, saved: str) -> None:
        super().__init__(
            f"Step {step} failed on rank {rank}: {cause}. An engine of DeepSpeed cannot undo a "
            f"step, so all ranks stop. {saved} If memory ran out, start again with a smaller "
            "micro_batch_size, a higher stage, or offload."
        )


class Ending:
    """Watch the steps of one engine.

    Args:
        folder: for the checkpoint of an emergency; None writes none.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self._folder = folder
        self._checkpoint: _EmergencyCheckpoint | None = None
        self._engine: Any = None
        self._is_torn = self._has_ended = self._is_inside = self._has_passes = False
        self._closed = threading.Event()
        self._saving = threading.Lock()
        self._saved = ""
        self._is_lost_elsewhere, self._failed_steps = False, -1
        self._hook: Any = None

    def watch_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Note when the update begins, after which states are no longer those of one step."""
        self._hook = optimizer.register_step_pre_hook(self._note_update)

    def begin(self, engine: Any) -> None:
        """Listen for other ranks from now on."""
        self._engine = engine
        if self._folder is not None:
            self._checkpoint = _EmergencyCheckpoint(engine, Path(self._folder))
        self._rank = dist.get_rank()
        # There is no public way to the store. Names are used once; every rank counts alike.
        store: Any = dist.distributed_c10d._get_default_store()
        number = store.add(f"memfit-engines-{self._rank}", 1)
        self._store = store
        self._key = f"memfit-engine-{number}-failed"
        if dist.get_world_size() > 1:
            threading.Thread(target=self._listen, daemon=True, name="memfit-engine").start()

    def note_passes(self) -> None:
        """Note that ranks have agreed on a step."""
        self._has_passes = True

    def note_done(self) -> None:
        """Note that an update is complete."""
        self._is_torn = False

    def close(self) -> None:
        """Listen no longer."""
        self._closed.set()
        if self._hook is not None:
            self._hook.remove()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Have an error inside end the run on all ranks.

        Raises:
            EngineStoppedError: for one of this rank, or an earlier one.
            OtherRankError: for one of another.
        """
        if self._has_ended:
            raise OtherRankError(f"the run has ended. {self._saved}".rstrip(". "))
        self._is_inside, self._has_passes = True, False
        try:
            yield
        except BaseException as error:
            if isinstance(error, _AGREED) and not self._has_passes:
                raise
            raised = self._ended(error)
            if not isinstance(error, Exception):  # an interrupt stays one
                raise
            raise raised from error
        finally:
            self._is_inside = False

    def _ended(self, error: BaseException) -> MemfitError:
        """Tell the other ranks, save what can be saved, and return what is to be raised."""
        self._has_ended = True
        steps = int(self._engine.global_steps)
        cause = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        if has_lost_peer(error):
            told = self._told(_LOOK_SECONDS)
            if told is None:
                self._closed.set()
                return OtherRankError(f"{cause}. Its shard of the states is gone with it")
            return OtherRankError(f"{told}. {self._save()}".rstrip(". "))
        if is_out_of_memory(error):
            cause = f"out of memory ({cause})"
        torn = "torn" if self._is_torn else "whole"
        self._store.set(self._key, f"{steps}|{torn}|rank {self._rank} failed: {cause}")
        self._closed.set()
        return EngineStoppedError(steps + 1, self._rank, cause, self._save())

    def _listen(self) -> None:
        """Wait until another rank says that it has failed; then save, and see this one end."""
        while not self._closed.wait(_LOOK_SECONDS):
            told = self._told(0.0)
            if told is not None:
                break
        else:
            return
        self._has_ended = True
        self._save()
        give_up = time.monotonic() + _PATIENCE_SECONDS
        while self._is_inside and time.monotonic() < give_up:
            if self._closed.wait(_LOOK_SECONDS):
                return
        if self._is_inside:  # in an exchange that nothing can end from here
            sys.stderr.write(printable(f"memfit: {OtherRankError(told)} {self._saved}\n"))
            sys.stderr.flush()
            os._exit(_EXIT_CODE)

    def _told(self, wait_seconds: float) -> str | None:
        """Return what another rank has said of its failure, if it could say anything."""
        time.sleep(wait_seconds)
        try:
            if not self._store.check([self._key]):
                return None
            steps, torn, told = self._store.get(self._key).decode().split("|", 2)
        except (RuntimeError, ValueError):  # the store has gone with its rank
            return None
        self._is_lost_elsewhere = torn == "torn"
        self._failed_steps = int(steps)
        return str(told)

    def _save(self) -> str:
        """Write this rank's part once, from whichever thread comes first; return what to say."""
        with self._saving:
            if not self._saved:
                self._saved = self._say_saved()
            return self._saved

    def _say_saved(self) -> str:
        if self._checkpoint is None:
            return "No folder was given for a checkpoint."
        steps = int(self._engine.global_steps)
        unlike = self._failed_steps not in {-1, steps}
        if self._is_torn or self._is_lost_elsewhere or unlike:
            return "Nothing was saved: the update was under way, and ranks differ."
        return self._checkpoint.write(steps)

    def _note_update(self, *_: object) -> None:
        self._is_torn = True


class _EmergencyCheckpoint:
    """Write DeepSpeed's own files, which ``load_checkpoint`` reads, without its barriers.

    ``latest`` is written by the first rank alone, once all parts are there.

    Args:
        engine: of DeepSpeed.
        folder: that all ranks see.
    """

    def __init__(self, engine: Any, folder: Path) -> None:
        self._engine, self._folder = engine, folder
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()

    def write(self, num_steps: int) -> str:
        """Write this rank's part of the state after so many steps; return what to say of it."""
        engine, tag = self._engine, f"emergency_step{num_steps}"
        if engine.zero_nvme_offload_optimizer():
            return "Nothing was saved: states lie in files of the NVMe disk."
        if num_steps == 0:
            return "Nothing was saved: no step was done yet."
        place = self._folder / tag
        try:
            place.mkdir(parents=True, exist_ok=True)
            # As DeepSpeed's save_checkpoint does (engine.py, 0.19.8), which waits for all ranks.
            with patch.object(engine, "module_state_dict", self._weights):
                engine._save_checkpoint(str(self._folder), tag, client_state={})
            if engine.save_zero_checkpoint:
                engine._save_zero_checkpoint(str(self._folder), tag)
            (place / f"rank-{self._rank}.saved").touch()
            if self._rank == 0 and not self._finish(place):
                return f"Nothing was saved: other ranks have not written their parts of {place}."
        except Exception as error:  # noqa: BLE001 - the failure that brought us here is told first
            return f"Nothing was saved: {type(error).__name__}: {error}."
        return f"The state after step {num_steps} lies in {place}; run.load_checkpoint reads it."

    def _weights(self, **_: object) -> dict[str, Any]:
        """Return the module's state; in stage 3 without weights that a pass has gathered.

        DeepSpeed's own files have empty places for them: what counts there are the fp32 shards.
        """
        state: dict[str, Any] = dict(self._engine.module.state_dict())
        for name, parameter in self._engine.module.named_parameters():
            if hasattr(parameter, "ds_tensor") and not parameter.ds_persist:
                state[name] = torch.empty(0, dtype=parameter.dtype)
        return state

    def _finish(self, place: Path) -> bool:
        """Name the checkpoint as the latest when all parts are there."""
        parts = [place / f"rank-{rank}.saved" for rank in range(self._num_ranks)]
        give_up = time.monotonic() + _WAIT_SECONDS
        while not all(part.exists() for part in parts):
            if time.monotonic() > give_up:
                return False
            time.sleep(_PART_LOOK_SECONDS)
        (self._folder / "latest").write_text(place.name, encoding="utf-8")
        return True
