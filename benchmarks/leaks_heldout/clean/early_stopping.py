"""The best weights are replaced; the three best checkpoints are kept and the worst dropped."""

import copy
import heapq

import torch
from torch import nn


class EarlyStopping:
    def __init__(self):
        self.best, self.best_state, self.top = float("inf"), None, []

    def __call__(self, loss, model, epoch):
        if loss < self.best:
            self.best, self.best_state = loss, copy.deepcopy(model.state_dict())
        heapq.heappush(self.top, (-loss, epoch, copy.deepcopy(model.state_dict())))
        if len(self.top) > 3:
            heapq.heappop(self.top)


def main():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128))
    optimizer = torch.optim.Adam(model.parameters())
    stopping = EarlyStopping()
    for epoch in range(10):
        for _ in range(30):
            x = torch.randn(32, 128)
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            x = torch.randn(512, 128)
            stopping(float((model(x) - x).square().mean()), model, epoch)


if __name__ == "__main__":
    main()
