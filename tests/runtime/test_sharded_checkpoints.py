"""A run that was saved in shards goes on as if nothing had been, on another number of ranks too."""

from __future__ import annotations

import random
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.runtime import sharded_checkpoints
from tests.runtime.guard_faults import batches_of, build_job, everything, same
from torch.distributed.checkpoint.api import CheckpointException
from torch.multiprocessing import spawn

import memfit
from memfit.errors import CheckpointError, MemfitWarning, OtherRankError
from memfit.runtime.shards import checkpoint


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (4, 1), (2, 2), (1, 2)])
def test_another_number_of_ranks_goes_on_with_the_same(
    tmp_path: Path, before: int, after: int
) -> None:
    """The same bits at first, and three steps later the same but for rounding."""
    arguments = (before, str(tmp_path / "one"), str(tmp_path))
    spawn(sharded_checkpoints.saves, args=arguments, nprocs=before)
    arguments = (after, str(tmp_path / "other"), str(tmp_path))
    spawn(sharded_checkpoints.goes_on, args=arguments, nprocs=after)
    for rank in range(after):
        saved, ended = map(float, (tmp_path / f"differs-{rank}.txt").read_text().split())
        assert saved == 0.0
        assert ended <= (0.0 if before == after else 1e-12)


def test_one_process_goes_on_with_everything(tmp_path: Path) -> None:
    """Weights, buffers, states, learning rate, generators and the number of steps, to the bit."""
    job = build_job()
    batches = batches_of(job, 4)
    run = memfit.start(job)
    for batch in batches[:2]:
        run.step(batch)
    run.optimizer.param_groups[0]["lr"] = 0.01
    run.save_sharded(tmp_path / "checkpoint")
    for batch in batches[2:]:
        run.step(batch)
    wanted = {**everything(run), "numpy": torch.tensor(np.random.randint(1000))}
    run.close()
    torch.manual_seed(77)
    random.seed(77)
    np.random.seed(77)
    other = memfit.start(job)
    other.load_sharded(tmp_path / "checkpoint")
    for batch in batches[2:]:
        other.step(batch)
    same({**everything(other), "numpy": torch.tensor(np.random.randint(1000))}, wanted)
    other.close()


def test_a_run_without_a_step_is_saved_without_states(tmp_path: Path) -> None:
    job = build_job(batch_norm=False)
    run = memfit.start(job)
    run.save_sharded(tmp_path)
    wanted = everything(run)
    run.step(batches_of(job, 1)[0])
    run.load_sharded(tmp_path)
    same(everything(run), wanted)
    assert not run.optimizer.state
    run.close()


def test_a_save_that_fails_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = build_job(batch_norm=False)
    run = memfit.start(job)
    run.step(batches_of(job, 1)[0])
    run.save_sharded(tmp_path)
    wanted = everything(run)
    run.step(batches_of(job, 1, seed=10)[0])

    def fails(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save", fails)
        with pytest.raises(CheckpointError, match="No space left"):
            run.save_sharded(tmp_path)
    run.load_sharded(tmp_path)
    same(everything(run), wanted)
    run.save_sharded(tmp_path)
    assert len([*tmp_path.glob("step-*")]) == 1, "what was interrupted and what is old is dropped"
    run.close()


def test_the_folders_of_others_outlive_a_save(tmp_path: Path) -> None:
    run = memfit.start(build_job(batch_norm=False))
    run.save_sharded(tmp_path)
    (earlier,) = tmp_path.glob("step-*")
    mine = [tmp_path / "step-by-step" / "notes.txt", earlier / "notes.txt"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    with pytest.warns(MemfitWarning, match=r"is kept: no save has written notes\.txt"):
        run.save_sharded(tmp_path)
    assert all(path.exists() for path in mine)
    assert (earlier / "run.pt").exists()
    run.close()


def test_a_full_disk_is_named_for_the_shards_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            failure = RuntimeError("unexpected pos 704 vs 598")
            failure.__context__ = sys.exception()
        raise CheckpointException("save", {0: (failure, traceback.StackSummary())})

    run = memfit.start(build_job(batch_norm=False))
    monkeypatch.setattr(checkpoint, "save", fails)
    with pytest.raises(CheckpointError, match=r"rank 0: No space left on the disk that holds .*"):
        run.save_sharded(tmp_path)
    run.close()


def test_a_rank_that_dies_while_all_save_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reset(*_: object, **__: object) -> None:
        raise RuntimeError("Read error [127.0.0.1]:29359: Connection reset by peer. GLHF!")

    run = memfit.start(build_job(batch_norm=False))
    monkeypatch.setattr(checkpoint, "rank_here", lambda: (0, 2))
    for name in ("broadcast_object_list", "all_gather_object"):
        with monkeypatch.context() as patched:
            patched.setattr(torch.distributed, "broadcast_object_list", lambda *_, **__: None)
            patched.setattr(torch.distributed, name, reset)
            with pytest.raises(OtherRankError, match="Connection reset by peer"):
                run.save_sharded(tmp_path)
    run.close()


def test_what_is_not_there_or_of_another_model_is_refused(tmp_path: Path) -> None:
    run = memfit.start(build_job(batch_norm=False))
    with pytest.raises(CheckpointError, match="a save that was finished leaves"):
        run.load_sharded(tmp_path / "nothing")
    run.save_sharded(tmp_path)
    run.close()
    job = replace(build_job(), model=lambda: torch.nn.Linear(6, 3))
    with memfit.start(job) as other, pytest.raises(CheckpointError, match="another model"):
        other.load_sharded(tmp_path)
