"""Writes the checkpoint of an emergency: every rank its own part, waiting for none."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

_WAIT_SECONDS = 20.0
_LOOK_SECONDS = 0.2


class EmergencyCheckpoint:
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
            time.sleep(_LOOK_SECONDS)
        (self._folder / "latest").write_text(place.name, encoding="utf-8")
        return True
