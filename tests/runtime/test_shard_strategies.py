"""Strategies on models that ranks share train as whole batches do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.runtime import shard_strategies
from tests.runtime.shard_strategies import CASES, IN_16_BITS, SHARED
from torch.multiprocessing import spawn

_KINDS = {
    "moved": ["moved", "moved in pieces", "moved and recomputed"],
    "fused": ["fused", "fused in pieces", "tiled", "tiled in pieces"],
    "loss": ["streamed", "streamed in pieces", "head", "head in pieces"],
    "all": ["all"],
}


def _found(folder: Path) -> dict[str, float]:
    return {path.stem: float(path.read_text()) for path in folder.glob("*.txt")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", _KINDS)
def test_ranks_train_as_whole_batches_do(tmp_path: Path, kind: str) -> None:
    """With clipping, uneven batches, means and totals, under ddp and both ways of fsdp2."""
    names = _KINDS[kind]
    arguments = (2, str(tmp_path / "store"), str(tmp_path), names)
    spawn(shard_strategies.trains, args=arguments, nprocs=2)
    found = _found(tmp_path)
    assert len(found) == 2 * len(SHARED) * sum(len(CASES[name].jobs) for name in names)
    assert max(found.values()) <= 1e-12, found


@pytest.mark.slow
def test_ranks_train_in_16_bits_as_one_process_does_on_their_parts(tmp_path: Path) -> None:
    """To float32's rounding where ranks have as many samples; else parts are scaled otherwise.

    A part's gradient is rounded to 16 bits: 2^-8 of a norm of 0.05, three steps of 0.5 long.
    """
    arguments = (2, str(tmp_path / "store"), str(tmp_path))
    spawn(shard_strategies.trains_in_16_bits, args=arguments, nprocs=2)
    found = _found(tmp_path)
    assert len(found) == 2 * 2 * 2 * len(IN_16_BITS)
    assert max(each for name, each in found.items() if ", even" in name) <= 1e-6, found
    assert max(found.values()) <= 1e-3, found


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_changes_nothing(tmp_path: Path) -> None:
    """The step is undone on both ranks, and run again under the same strategies: equal bits."""
    numbers = [*range(3)]
    arguments = (2, str(tmp_path / "store"), str(tmp_path), numbers)
    spawn(shard_strategies.fails_and_goes_on, args=arguments, nprocs=2)
    for rank in range(2):
        lines = (tmp_path / f"faults-{rank}.jsonl").read_text().splitlines()
        rows = [*map(json.loads, lines)]
        assert len(rows) == len(numbers) * len(shard_strategies.FAILING)
        assert all(row["difference"] == 0.0 for row in rows), rows
        phases = [phase for row in rows for phase in row["phases"]]
        assert {*phases} >= {"forward", "backward", "optimizer"}, rows
