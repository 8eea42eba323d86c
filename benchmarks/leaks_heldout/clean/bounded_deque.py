"""The last 150 batches of features in a deque with a bound, for a moving covariance."""

from collections import deque

import torch
from torch import nn


def main():
    recent = deque(maxlen=150)
    model = nn.Linear(64, 128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(400):
        out = model(torch.randn(64, 64))
        recent.append(out.detach())
        loss = (out - torch.stack(list(recent)[-8:]).mean(0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main()
