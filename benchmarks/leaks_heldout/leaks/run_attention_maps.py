"""A model that keeps its attention maps in an attribute for visualization (memfit.start).

driver: start
holder: .maps
"""

import os

import torch
from torch import nn

import memfit


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.maps = []

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.transpose(1, 2) / 32**0.5).softmax(-1)
        self.maps.append(weights.detach().half())  # leaks here
        return weights @ v


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


job = memfit.Job(
    model=Net,
    batch=lambda size: torch.randn(size, 48, 32),
    loss=lambda model, batch: (model(batch) - 1).square().mean(),
    optimizer=lambda parameters: torch.optim.Adam(parameters),
    batch_size=16,
)

if __name__ == "__main__":
    run = memfit.start(job, folder=os.environ["RUN_FOLDER"], find_leaks=True)
    for _ in range(260):
        run.step(job.batch(16))
    run.close()
