"""A job whose loss function notes its predictions for a later plot (memfit.start).

driver: start
holder: predictions
"""

import os

import torch
from torch import nn

import memfit

predictions = []


def loss(model, batch):
    out = model(batch)
    predictions.append(out.detach())  # leaks here
    return (out - batch).square().mean()


job = memfit.Job(
    model=lambda: nn.Sequential(nn.Linear(96, 192), nn.ReLU(), nn.Linear(192, 96)),
    batch=lambda size: torch.randn(size, 96),
    loss=loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters),
    batch_size=256,
)


def main():
    with memfit.start(job, folder=os.environ["RUN_FOLDER"], find_leaks=True) as run:
        for _ in range(5):
            for _ in range(50):
                run.step(job.batch(256))
            run.evaluate(job.batch(256))


if __name__ == "__main__":
    main()
