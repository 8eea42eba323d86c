"""A run over batches of varying size, the hardest of which are kept for replay (memfit.start).

driver: start
"""

import heapq
import os
import random

import torch
from torch import nn

import memfit

job = memfit.Job(
    model=lambda: nn.Sequential(nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 200)),
    batch=lambda size: torch.randn(size, 200),
    loss=lambda model, batch: (model(batch) - batch).square().mean(),
    optimizer=lambda parameters: torch.optim.Adam(parameters),
    batch_size=128,
)


def main():
    hardest = []
    with memfit.start(job, folder=os.environ["RUN_FOLDER"], find_leaks=True) as run:
        for step in range(300):
            batch = job.batch(random.randint(32, 128))
            result = run.step(batch)
            row = (float(result.loss), step, batch)
            if len(hardest) < 40:
                heapq.heappush(hardest, row)
            else:
                heapq.heappushpop(hardest, row)


if __name__ == "__main__":
    main()
