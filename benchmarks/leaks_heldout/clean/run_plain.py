"""A run with evaluations, whose means are kept as floats (memfit.start).

driver: start
"""

import os

import torch
from torch import nn

import memfit

job = memfit.Job(
    model=lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)),
    batch=lambda size: torch.randn(size, 64),
    loss=lambda model, batch: (model(batch) - batch).square().mean(),
    optimizer=lambda parameters: torch.optim.AdamW(parameters),
    batch_size=128,
)


def main():
    losses, scores = [], []
    with memfit.start(job, folder=os.environ["RUN_FOLDER"], find_leaks=True) as run:
        for epoch in range(8):
            for _ in range(40):
                losses.append(float(run.step(job.batch(128)).loss))
            found = [run.evaluate(job.batch(128), lambda m, b: m(b)) for _ in range(10)]
            scores.append({"epoch": epoch, "norm": float(torch.cat(found).norm())})
    print(scores[-1])


if __name__ == "__main__":
    main()
