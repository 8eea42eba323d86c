"""Scores of all evaluations of a run stay in a dict by step (memfit.start and Run.evaluate).

driver: start
holder: scores
"""

import os

import torch
from torch import nn

import memfit

job = memfit.Job(
    model=lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 100)),
    batch=lambda size: torch.randn(size, 64),
    loss=lambda model, batch: model(batch).logsumexp(1).mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    batch_size=128,
)


def main():
    scores = {}
    with memfit.start(job, folder=os.environ["RUN_FOLDER"], find_leaks=True) as run:
        for epoch in range(6):
            for _ in range(40):
                run.step(job.batch(128))
            for i in range(10):
                scores[epoch, i] = run.evaluate(job.batch(128), lambda m, b: m(b))  # leaks here
    print(len(scores))


if __name__ == "__main__":
    main()
