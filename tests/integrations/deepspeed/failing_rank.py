"""One rank of a training that fails: python failing_rank.py FOLDER RANK NUM_RANKS STAGE HOW."""

from __future__ import annotations

import os
import signal
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch
from tests.integrations.deepspeed import engine_ranks as ranks

from memfit.integrations.deepspeed import EngineRun, ZeroChoice, start

FAILS_IN, NUM_STEPS = 2, 4
"""The step, counted from zero, in which the last rank fails."""


def fail_in(run: EngineRun, how: str) -> None:
    """Have the second backward of a step fail."""
    backward, calls = run.engine.backward, count(1)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 2 * FAILS_IN + 2:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise torch.OutOfMemoryError("CUDA out of memory: tried to allocate 1 TiB")
        return backward(*args, **kwargs)

    run.engine.backward = failing


def main() -> None:
    folder, rank, num_ranks, stage = sys.argv[1], *map(int, sys.argv[2:5])
    how, is_last = sys.argv[5], rank == num_ranks - 1
    ranks.joined(rank, num_ranks, f"{folder}/store-{how}")
    choice = ZeroChoice(stage=stage, micro_batch_size=4, persistence_elements=0)
    run = start(ranks.job_of(ranks.mean, 8), choice, folder=f"{folder}/saved")
    if is_last and how != "none":
        fail_in(run, how)
    if how == "none":
        run.load_checkpoint(f"{folder}/saved")
    began = run.num_steps
    try:
        for seed in range(began, NUM_STEPS):
            run.step(ranks.rows(8, 10 * seed + rank))
    except Exception as error:
        (Path(folder) / f"said-{rank}").write_text(f"{type(error).__name__}: {error}")
        if how == "swallowed" and is_last:
            time.sleep(45)  # as a script that goes on with something else
        raise
    with run.whole_weights() as weights:
        torch.save({"began": began, **weights}, f"{folder}/weights-{rank}.pt")


if __name__ == "__main__":
    main()
