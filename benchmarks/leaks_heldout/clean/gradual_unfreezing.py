"""One layer more is trained each epoch, so that optimizer states and gradients grow."""

import torch
from torch import nn

layers = [nn.Linear(256, 256) for _ in range(6)]
model = nn.Sequential(*layers).requires_grad_(False)
optimizer = torch.optim.AdamW([{"params": layers[-1].parameters(), "lr": 1e-3}])
layers[-1].requires_grad_(True)
for epoch in range(9):
    if 0 < epoch < 6:
        layer = layers[-1 - epoch].requires_grad_(True)
        optimizer.add_param_group({"params": layer.parameters(), "lr": 1e-3 / 2.6**epoch})
    for _ in range(35):
        x = torch.randn(64, 256)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
