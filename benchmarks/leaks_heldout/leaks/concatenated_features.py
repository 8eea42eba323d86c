"""Features of all batches are concatenated into one tensor that only grows.

holder: bank
"""

import torch
from torch import nn


def train(num_epochs=6):
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128))
    optimizer = torch.optim.Adam(model.parameters())
    bank = torch.empty(0, 128)
    for epoch in range(num_epochs):
        for _ in range(40):
            x = torch.randn(64, 64)
            features = nn.functional.normalize(model(x), dim=1)
            loss = -features.var(0).mean()
            if len(bank):
                loss = loss + (features @ bank[-256:].T).logsumexp(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            bank = torch.cat([bank, features.detach()])  # leaks here
        print(epoch, bank.shape)


if __name__ == "__main__":
    train()
