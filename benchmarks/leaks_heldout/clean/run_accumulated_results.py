"""Step results are summed without a float, but detached (memfit.start).

driver: start
"""

import os

import torch
from torch import nn

import memfit

job = memfit.Job(
    model=lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 196, 10)
    ),
    batch=lambda size: torch.randn(size, 3, 16, 16),
    loss=lambda model, batch: model(batch).logsumexp(1).mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    batch_size=32,
)

if __name__ == "__main__":
    with memfit.start(job, folder=os.environ["RUN_FOLDER"], find_leaks=True) as run:
        total, best, best_state = torch.zeros(()), float("inf"), None
        for epoch in range(5):
            for _ in range(50):
                total += run.step(job.batch(32)).loss
            score = float(run.evaluate(job.batch(32)))
            if score < best:
                best, best_state = score, {k: v.clone() for k, v in run.model.state_dict().items()}
            print(epoch, float(total), best)
