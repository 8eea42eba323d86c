"""Gradients over eight batches; their losses and outputs are kept until the step."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(100, 300), nn.ReLU(), nn.Linear(300, 50))
optimizer = torch.optim.Adam(model.parameters())
pending, history = [], []
for batch in range(1600):
    x = torch.randn(32, 100)
    out = model(x)
    loss = out.square().mean() / 8
    loss.backward()
    pending.append({"loss": loss, "out": out})
    if batch % 8 == 7:
        optimizer.step()
        optimizer.zero_grad()
        history.append({"loss": sum(p["loss"].item() for p in pending), "step": batch // 8})
        pending = []
