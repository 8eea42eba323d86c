"""Ranks that carry out a plan train what the whole batch does, or refuse with the reason."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from tests.runtime import planned_ranks
from tests.runtime.sharded_ranks import job_of, mean, model
from torch.multiprocessing import spawn

import memfit
from memfit import Plan
from memfit.errors import UsageError


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_end_as_whole_batches_do(tmp_path: Path, num_ranks: int) -> None:
    """From weights of their own, with clipping, uneven shares, and ranks that count nothing."""
    spawn(
        planned_ranks.trains,
        args=(num_ranks, str(tmp_path / "store"), str(tmp_path)),
        nprocs=num_ranks,
    )
    found = {path.stem: float(path.read_text()) for path in tmp_path.glob("*.txt")}

    assert len(found) == len(planned_ranks.PLANS) * 2 * num_ranks
    assert all(each <= 1e-12 for each in found.values()), found


@pytest.mark.slow
def test_what_ranks_cannot_carry_out_together_is_refused_on_all(tmp_path: Path) -> None:
    spawn(planned_ranks.is_refused, args=(2, str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    for rank in range(2):
        said = (tmp_path / f"said-{rank}.txt").read_text().splitlines()
        fragments = (
            "The plan is for 3 rank(s), and here are 2.",
            "the ranks have different plans",
            "Ranks have different samples, so they would train another loss",
            "_flat_weights holds a parameter",
            "cannot be shared by 2 ranks",
        )
        assert len(said) == len(fragments), said
        for line, fragment in zip(said, fragments, strict=True):
            assert fragment in line


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_goes_on_with_the_others(tmp_path: Path) -> None:
    """Under half the micro-batch, or the next plan of the ladder, shared in the same way."""
    spawn(planned_ranks.recovers, args=(2, str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}

    assert len(found) == 8
    assert all(each["worst"] <= 1e-12 for each in found.values()), found
    assert all(each["events"] >= 3 for each in found.values()), found


@pytest.mark.parametrize("name", [None, "ddp"])
def test_a_plan_for_fewer_ranks_is_not_run_by_each_of_several(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would train by itself, and no one would say so."""
    monkeypatch.setenv("WORLD_SIZE", "4" if name is None else "1")
    plan = Plan(ranks=1) if name is None else planned_ranks.plan_of(name, 2)
    with pytest.raises(UsageError, match="torchrun --nproc-per-node"):
        memfit.start(job_of(model, mean, 4), plan)


@pytest.mark.slow
def test_a_plan_from_a_file_runs_as_torchrun_starts_it(tmp_path: Path) -> None:
    planned_ranks.plan_of("kept whole", 2).save(tmp_path / "plan.yaml")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    spawn(planned_ranks.opens_its_group, args=(2, port, str(tmp_path)), nprocs=2)

    assert Plan.load(tmp_path / "plan.yaml").ranks == 2
    for rank in range(2):
        assert float((tmp_path / f"worst-{rank}.txt").read_text()) <= 1e-12
