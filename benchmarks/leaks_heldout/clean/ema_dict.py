"""A moving average of the weights, whose dict is built anew in each step."""

import torch
from torch import nn


class EMA:
    def __init__(self, model):
        self.shadow = {k: v.detach().clone() for k, v in model.state_dict().items()}

    def update(self, model):
        state = model.state_dict()
        self.shadow = {k: 0.99 * v + 0.01 * state[k].detach() for k, v in self.shadow.items()}


def main():
    model = nn.Sequential(nn.Linear(200, 400), nn.ReLU(), nn.Linear(400, 200))
    ema = EMA(model)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=300)
    for _ in range(300):
        x = torch.randn(64, 200)
        loss = (model(x) - x).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        ema.update(model)


main()
