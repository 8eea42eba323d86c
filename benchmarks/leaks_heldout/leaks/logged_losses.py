"""A logger of scalars is given loss tensors instead of floats.

holder: logger.scalars | .scalars
"""

from collections import defaultdict

import torch
from torch import nn


class Logger:
    def __init__(self):
        self.scalars = defaultdict(list)

    def add_scalar(self, tag, value, step):
        self.scalars[tag].append((step, value))

    def summary(self):
        return {
            tag: float(sum(v for _, v in rows[-20:]) / 20) for tag, rows in self.scalars.items()
        }


def main():
    logger = Logger()
    model = nn.LSTM(32, 64, batch_first=True)
    head = nn.Linear(64, 8)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
    for step in range(200):
        x, y = torch.randn(16, 20, 32), torch.randint(0, 8, (16,))
        out, _ = model(x)
        loss = nn.functional.cross_entropy(head(out[:, -1]), y)  # leaks here
        penalty = sum(p.square().sum() for p in head.parameters())  # leaks here
        (loss + 1e-4 * penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
        logger.add_scalar("loss", loss, step)
        logger.add_scalar("penalty", penalty, step)
        if step % 50 == 49:
            print(logger.summary())


main()
