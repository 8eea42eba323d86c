"""A method with functools.cache whose argument is a tensor, which hashes by identity.

holder: Similarity.kernel | kernel
"""

import functools

import torch
from torch import nn


class Similarity(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(32, 32)

    @functools.cache  # noqa: B019
    def kernel(self, x):
        return torch.cdist(x, x).neg().exp()  # leaks here

    def forward(self, x):
        z = self.project(x)
        return (self.kernel(x) * (z @ z.T)).mean()


def main():
    model = Similarity()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(5):
        for _ in range(40):
            x = torch.randn(200, 32)
            loss = -model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


main()
