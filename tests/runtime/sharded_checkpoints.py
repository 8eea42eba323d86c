"""Ranks that save a run in shards, and others that go on with it."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tests.runtime import sharded_faults, sharded_ranks
from tests.runtime.sharded_faults import Ending, ending, part_of

import memfit
from memfit import Plan

BEFORE, AFTER = range(2), range(2, 5)
"""Which steps are done before the checkpoint, and which after it."""
_SIZE = 12


def joined(rank: int, num_ranks: int, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    wait = timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{store}", wait, num_ranks, rank)


def _written(found: Ending, path: Path) -> None:
    torch.save({"weights": found.weights, "states": found.states}, path)


def saves(rank: int, num_ranks: int, store: str, folder: str) -> None:
    """Train, save, and train on; write what all ranks hold at both moments."""
    joined(rank, num_ranks, store)
    run = memfit.start(sharded_faults.job_of(num_ranks), Plan())
    for seed in BEFORE:
        run.step(part_of(sharded_ranks.rows(_SIZE, seed)))
    run.save_sharded(Path(folder, "checkpoint"))
    _written(ending(run), Path(folder, f"saved-{rank}.pt"))
    for seed in AFTER:
        run.step(part_of(sharded_ranks.rows(_SIZE, seed)))
    _written(ending(run), Path(folder, f"ended-{rank}.pt"))
    run.close()
    dist.destroy_process_group()


def goes_on(rank: int, num_ranks: int, store: str, folder: str) -> None:
    """Load what others have saved, and train on; write how far both are from theirs."""
    joined(rank, num_ranks, store)
    run = memfit.start(sharded_faults.job_of(num_ranks), Plan())
    run.load_sharded(Path(folder, "checkpoint"))
    assert run.num_steps == len(BEFORE)
    saved = _differs(ending(run), Path(folder, "saved-0.pt"))
    for seed in AFTER:
        run.step(part_of(sharded_ranks.rows(_SIZE, seed)))
    ended = _differs(ending(run), Path(folder, "ended-0.pt"))
    run.close()
    Path(folder, f"differs-{rank}.txt").write_text(f"{saved!r} {ended!r}")
    dist.destroy_process_group()


def _differs(found: Ending, path: Path) -> float:
    wanted = torch.load(path)
    whole = Ending(weights=wanted["weights"], states=wanted["states"], events=(), operators=())
    return sharded_faults.difference(found, whole)
