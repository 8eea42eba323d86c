"""Metrics that keep all predictions of an epoch, and are reset after it."""

import torch
import torchmetrics
from torch import nn

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 20))
train_auroc = torchmetrics.AUROC(task="multiclass", num_classes=20)
valid_auroc = torchmetrics.AUROC(task="multiclass", num_classes=20)
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(5):
    for _ in range(60):
        x, y = torch.randn(256, 64), torch.randint(0, 20, (256,))
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        train_auroc.update(logits.detach(), y)
    with torch.no_grad():
        for _ in range(15):
            valid_auroc.update(model(torch.randn(512, 64)), torch.randint(0, 20, (512,)))
    print(epoch, float(train_auroc.compute()), float(valid_auroc.compute()))
    train_auroc.reset()
    valid_auroc.reset()
