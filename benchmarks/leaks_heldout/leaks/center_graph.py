"""A running centre of the features, logged only, that is never detached.

holder: head.center | model.head.center | .center
"""

import torch
from torch import nn


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(128, 64)
        self.register_buffer("center", torch.zeros(64))

    def forward(self, features):
        out = self.project(features)
        self.center = 0.9 * self.center + 0.1 * out.mean(0)  # leaks here
        return out


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.ReLU())
        self.head = Head()

    def forward(self, x):
        return self.head(self.body(x))


model = Net()
optimizer = torch.optim.Adam(model.parameters())
for step in range(300):
    x = torch.randn(256, 64)
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 100 == 0:
        print(step, loss.item(), model.head.center.norm().item())
