"""Features of the whole data set are collected each epoch for new pseudo labels (DeepCluster)."""

import torch
from torch import nn


class Clusterer:
    def __init__(self):
        self.data = torch.randn(3000, 32)
        self.model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 128))
        self.head = nn.Linear(128, 10)
        parameters = [*self.model.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.05)
        self.features = []

    def collect(self):
        self.features = []
        with torch.no_grad():
            for x in self.data.split(100):
                self.features.append(self.model(x))
        features = torch.cat(self.features)
        return torch.cdist(features, features[:10]).argmin(1)

    def fit(self):
        for _ in range(5):
            labels = self.collect()
            for index in torch.randperm(3000).split(60):
                logits = self.head(self.model(self.data[index]))
                loss = nn.functional.cross_entropy(logits, labels[index])
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()


Clusterer().fit()
