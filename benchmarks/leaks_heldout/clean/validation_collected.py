"""Validation every 50 steps; what it collects is put together, measured and dropped."""

import torch
from torch import nn


def validate(model):
    scores, labels = [], []
    model.eval()
    with torch.no_grad():
        for _ in range(20):
            scores.append(model(torch.randn(256, 64)))
            labels.append(torch.randint(0, 50, (256,)))
    model.train()
    return (torch.cat(scores).argmax(1) == torch.cat(labels)).float().mean().item()


def main():
    model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 50))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    accuracies = []
    for step in range(350):
        x, y = torch.randn(64, 64), torch.randint(0, 50, (64,))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            accuracies.append(validate(model))
    print(accuracies)


if __name__ == "__main__":
    main()
