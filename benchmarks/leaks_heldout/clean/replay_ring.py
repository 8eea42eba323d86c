"""A replay memory that is a list up to its capacity, and overwritten in turn from then on."""

import random

import torch
from torch import nn


class ReplayMemory:
    def __init__(self, capacity):
        self.capacity, self.rows, self.at = capacity, [], 0

    def push(self, row):
        if len(self.rows) < self.capacity:
            self.rows.append(None)
        self.rows[self.at] = row
        self.at = (self.at + 1) % self.capacity

    def sample(self, n):
        return random.sample(self.rows, n)


def main():
    memory = ReplayMemory(600)
    model = nn.Sequential(nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 1024))
    optimizer = torch.optim.Adam(model.parameters())
    state = torch.randn(1024)
    for _ in range(400):
        for _ in range(3):
            following = state * 0.9 + torch.randn(1024) * 0.1
            memory.push((state, following))
            state = following
        if len(memory.rows) >= 48:
            rows = memory.sample(32)
            x, y = torch.stack([a for a, _ in rows]), torch.stack([b for _, b in rows])
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
