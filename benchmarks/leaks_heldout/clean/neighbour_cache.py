"""Neighbourhoods of sampled nodes are cached as they are met, until all are known."""

import torch
from torch import nn

NUM_NODES = 900


class Sampler:
    def __init__(self):
        self.features = torch.randn(NUM_NODES, 64)
        self.edges = torch.randint(0, NUM_NODES, (NUM_NODES, 40))
        self.cache = {}

    def neighbourhood(self, node):
        if node not in self.cache:
            self.cache[node] = self.features[self.edges[node]].clone()
        return self.cache[node]


def main():
    sampler, model = Sampler(), nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(400):
        nodes = torch.randint(0, NUM_NODES, (12,)).tolist()
        x = torch.stack([sampler.neighbourhood(node).mean(0) for node in nodes])
        loss = (model(x) - sampler.features[nodes]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
