"""A model that grows twice, as progressive GANs do, with a new optimizer each time."""

import torch
from torch import nn

blocks = nn.ModuleList([nn.Linear(128, 128)])
optimizer = torch.optim.Adam(blocks.parameters())
for epoch in range(8):
    if epoch in (2, 4):
        blocks.append(nn.Linear(128, 128))
        blocks.append(nn.Linear(128, 128))
        optimizer = torch.optim.Adam(blocks.parameters())
    for _ in range(40):
        target = torch.randn(64, 128)
        x = target
        for block in blocks:
            x = block(x).relu() + x
        loss = (x - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, float(loss))
