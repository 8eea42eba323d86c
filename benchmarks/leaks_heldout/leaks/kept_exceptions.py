"""Batches that fail are noted with their exception, whose traceback holds the frame's tensors.

holder: failures
"""

import torch
from torch import nn


class BadBatchError(ValueError):
    pass


def forward(model, x):
    hidden = model[0](x)  # leaks here
    hidden = model[1](hidden)  # leaks here
    if x[0, 0] > 0.4:
        raise BadBatchError("outlier")  # leaks here
    return model[2](hidden).square().mean()


def main():
    model = nn.Sequential(nn.Linear(100, 400), nn.ReLU(), nn.Linear(400, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    failures = []
    for step in range(400):
        x = torch.randn(64, 100)  # leaks here
        try:
            loss = forward(model, x)
        except BadBatchError as error:
            failures.append((step, error))
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(len(failures), "bad batches")


main()
