"""A history as notebooks have it: a dict of lists of floats, and rows for a data frame."""

import time

import torch
from torch import nn

history = {"loss": [], "lr": [], "grad_norm": [], "seconds": []}
rows = []
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters())
for step in range(400):
    began = time.perf_counter()
    x, y = torch.randn(64, 32), torch.randn(64, 1)
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    history["loss"].append(loss.item())
    history["lr"].append(optimizer.param_groups[0]["lr"])
    history["grad_norm"].append(norm.item())
    history["seconds"].append(time.perf_counter() - began)
    rows.append({"step": step, "loss": loss.item(), "note": f"step {step} of 400"})
