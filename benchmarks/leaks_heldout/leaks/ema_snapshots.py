"""A copy of the averaged model is kept every ten steps, for a plot that nobody draws.

holder: snapshots
"""

import copy

import torch
from torch import nn


def update(average, model, decay=0.99):
    with torch.no_grad():
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            a.lerp_(p, 1 - decay)


def main():
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters())
    snapshots = []
    for step in range(400):
        x = torch.randn(32, 256)
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        update(average, model)
        if step % 10 == 0:
            snapshots.append(copy.deepcopy(average))  # leaks here
    print(len(snapshots))


main()
