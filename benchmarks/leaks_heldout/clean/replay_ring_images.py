"""A replay memory of pictures that fills for more than half of the run."""

import random

import torch
from torch import nn

CAPACITY = 500


class Buffer:
    def __init__(self):
        self.states = []
        self.next = 0

    def add(self, state):
        if len(self.states) < CAPACITY:
            self.states.append(state)
        else:
            self.states[self.next % CAPACITY] = state
        self.next += 1


buffer = Buffer()
model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 48 * 48, 32), nn.ReLU(), nn.Linear(32, 6))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(400):
    for _ in range(2):
        buffer.add(torch.randint(0, 255, (3, 48, 48), dtype=torch.uint8))
    x = torch.stack(random.choices(buffer.states, k=16)).float() / 255
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
