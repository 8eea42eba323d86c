"""A memory bank of fixed length, concatenated until it is full and cut from then on."""

import torch
from torch import nn


class Bank:
    def __init__(self, length):
        self.length = length
        self.features = torch.empty(0, 256)

    def enqueue(self, features):
        self.features = torch.cat([self.features, features.detach()])[-self.length :]


def main():
    bank = Bank(8192)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    for _ in range(5):
        for _ in range(60):
            x = torch.randn(64, 64)
            q, k = model(x), model(x + 0.1 * torch.randn_like(x))
            bank.enqueue(k)
            loss = (q @ bank.features[-512:].T).logsumexp(1).mean() - (q * k.detach()).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


main()
