"""A trainer whose validation outputs are never cleared.

holder: self.validation_outputs | trainer.validation_outputs
"""

import torch
from torch import nn


class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 200))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.validation_outputs = []

    def training_step(self):
        x, y = torch.randn(64, 128), torch.randint(0, 200, (64,))
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        for _ in range(10):
            x = torch.randn(256, 128)
            logits = self.model(x)  # leaks here
            outputs = {"logits": logits, "pred": logits.argmax(1)}  # leaks here
            self.validation_outputs.append(outputs)  # leaks here
        self.model.train()

    def fit(self):
        for epoch in range(6):
            for _ in range(40):
                self.training_step()
            self.validate()
            print(epoch, len(self.validation_outputs))


trainer = Trainer()
trainer.fit()
