"""Attention over a sequence that ranks share is attention over the whole sequence (DeepSpeed Ulysses)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install memfit[deepspeed]")

ROOT = Path(__file__).parents[3]
MODULE = "tests.integrations.deepspeed.sequence_rank"


def run_ranks(folder: Path, num_heads: int, num_shared: int) -> list[tuple[int, str]]:
    """Run two ranks; return their exit codes and what they say of errors."""
    sizes = ["2", str(num_heads), str(num_shared)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", MODULE, str(folder), str(rank), *sizes],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, each) for process, each in zip(processes, said, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("num_shared", [4, 2])
def test_half_a_sequence_each_gives_what_the_whole_one_gives(tmp_path, num_shared):
    ended = run_ranks(tmp_path, 4, num_shared)
    assert [code for code, _ in ended] == [0, 0], ended
    found = [float((tmp_path / f"difference-{rank}").read_text("utf-8")) for rank in range(2)]
    assert max(found) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_heads", "num_shared", "reason"),
    [(4, 1, "must be at least the sequence parallel size"), (3, 3, "alltoallv")],
)
def test_heads_that_ranks_cannot_share_are_errors(tmp_path, num_heads, num_shared, reason):
    ended = run_ranks(tmp_path, num_heads, num_shared)
    assert all(code for code, _ in ended)
    assert any(reason in said for _, said in ended)
