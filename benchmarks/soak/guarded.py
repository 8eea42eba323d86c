"""A guarded run of very many tiny steps, some of which run out of memory, that notes its memory.

    python -m soak.guarded SAMPLES NUM_STEPS EVERY FOLDER

After every block of steps some of a bare loop follow, so that both see the same machine.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import memfit
from soak.sampling import Samples
from soak.training import BATCH_SIZE, WIDTH, build_model

_LARGE_BATCH_SIZE = 512
_LARGE_EVERY = 500
_LARGE_BUDGET_BYTES = 450_000
"""Too little for the large batch in one piece."""
_BARE_STEPS = 100


def soak_job() -> memfit.Job:
    """Make the job of the run."""
    return memfit.Job(
        model=build_model,
        batch=lambda size: torch.randn(size, WIDTH),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=_LARGE_BATCH_SIZE,
    )


def main(path: str, num_steps: int, every: int, folder: str) -> None:
    """Train on random batches, now and then on one that is too large."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    job, bare = soak_job(), _BareLoop()
    samples = Samples(Path(path), num_steps, every)
    guarded_seconds = 0.0
    with memfit.start(job, folder=folder, find_leaks=True) as run:
        for step in range(1, num_steps + 1):
            began_seconds = time.process_time()
            if step % _LARGE_EVERY:
                run.step(job.batch(BATCH_SIZE))
            else:
                with memfit.EnforcedBudget(_LARGE_BUDGET_BYTES):
                    run.step(job.batch(_LARGE_BATCH_SIZE))
            guarded_seconds += time.process_time() - began_seconds
            if step % every == 0:
                bare.go_on(_BARE_STEPS)
            samples.take(
                step,
                guarded_seconds=guarded_seconds,
                bare_step_seconds=bare.step_seconds,
                num_out_of_memory=len(run.events),
            )


class _BareLoop:
    """The same steps without memfit, on a model of its own."""

    def __init__(self) -> None:
        self._model = build_model()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._seconds, self._num_steps = 0.0, 0

    @property
    def step_seconds(self) -> float:
        return self._seconds / max(1, self._num_steps)

    def go_on(self, num_steps: int) -> None:
        began_seconds = time.process_time()
        for _ in range(num_steps):
            self._model(torch.randn(BATCH_SIZE, WIDTH)).square().mean().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._seconds += time.process_time() - began_seconds
        self._num_steps += num_steps


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
