"""Gradients of every step are kept by name, to look into their norms later.

holder: grad_history
"""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
grad_history = {name: [] for name, _ in model.named_parameters()}

for epoch in range(4):
    for _ in range(50):
        x, y = torch.randn(64, 128), torch.randn(64, 32)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            grad_history[name].append(parameter.grad.clone())  # leaks here
        optimizer.step()
    print(epoch, {name: float(torch.stack(g[-50:]).norm()) for name, g in grad_history.items()})
