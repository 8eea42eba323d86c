"""A new optimizer every epoch, for warm restarts; the old ones stay in a list with their states.

holder: runner.optimizers | self.optimizers
"""

import torch
from torch import nn


class Runner:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(300, 600), nn.ReLU(), nn.Linear(600, 100))
        self.optimizers = []
        self.schedulers = []

    def restart(self, lr):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        self.optimizers.append(optimizer)
        self.schedulers.append(scheduler)

    def epoch(self):
        optimizer, scheduler = self.optimizers[-1], self.schedulers[-1]
        for _ in range(25):
            x, y = torch.randn(64, 300), torch.randint(0, 100, (64,))
            loss = nn.functional.cross_entropy(self.model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # leaks here
            scheduler.step()
        with torch.no_grad():
            return float(self.model(torch.randn(512, 300)).logsumexp(1).mean())


runner = Runner()
for epoch in range(14):
    runner.restart(1e-3 / (1 + epoch))
    print(runner.epoch())
