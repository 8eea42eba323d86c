"""A step that fails under an engine ends on every rank, and is gone on with where that can be."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.integrations.deepspeed import engine_ranks, failing_rank

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install memfit[deepspeed]")

ROOT = Path(__file__).parents[3]
MOST_SECONDS = 60.0


def run_ranks(folder: Path, stage: int, how: str, num_ranks: int = 2) -> list[int]:
    """Run all ranks as processes of their own; return their exit codes."""
    module = "tests.integrations.deepspeed.failing_rank"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(folder), str(rank), str(num_ranks), str(stage), how],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(num_ranks)
    ]
    try:
        return [process.wait(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()


def plain_weights() -> dict[str, torch.Tensor]:
    """Train on the samples of both ranks, as plain PyTorch."""
    whole = engine_ranks.model()
    optimizer = engine_ranks.adamw(whole.parameters())
    for seed in range(failing_rank.NUM_STEPS):
        parts = [engine_ranks.rows(8, 10 * seed + rank) for rank in range(2)]
        optimizer.zero_grad()
        engine_ranks.mean(whole, [torch.cat(pair) for pair in zip(*parts, strict=True)]).backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), engine_ranks.CLIP)
        optimizer.step()
    return whole.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_out_of_memory_ends_all_ranks_and_training_goes_on_from_what_was_saved(
    tmp_path: Path, stage: int
) -> None:
    codes = run_ranks(tmp_path, stage, "out of memory")
    assert all(code not in {0, None} for code in codes)
    assert (
        "EngineStoppedError: Step 3 failed on rank 1: out of memory"
        in (tmp_path / "said-1").read_text()
    )
    assert (tmp_path / "saved" / "latest").read_text() == "emergency_step2"

    assert run_ranks(tmp_path, stage, "none") == [0, 0]
    found, whole = torch.load(tmp_path / "weights-0.pt"), plain_weights()
    assert found.pop("began") == failing_rank.FAILS_IN
    assert max(float((found[key] - whole[key]).abs().max()) for key in whole) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_killed_rank_ends_the_others_soon_and_nothing_is_saved(
    tmp_path: Path, stage: int
) -> None:
    started = time.monotonic()
    codes = run_ranks(tmp_path, stage, "killed")
    assert time.monotonic() - started < MOST_SECONDS
    assert codes[1] == -9
    assert codes[0] != 0
    assert "Its shard of the states is gone with it" in (tmp_path / "said-0").read_text()
    assert not (tmp_path / "saved" / "latest").exists()


@pytest.mark.slow
def test_a_rank_that_waits_for_one_that_goes_on_with_something_else_is_ended(
    tmp_path: Path,
) -> None:
    codes = run_ranks(tmp_path, 3, "swallowed")
    assert codes[0] == 4
    assert (tmp_path / "saved" / "latest").read_text() == "emergency_step2"
