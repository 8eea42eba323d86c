"""Sequences of random lengths, floats in the history."""

import random

import torch
from torch import nn

embed, gru, head = nn.Embedding(1000, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 1000)
parameters = [p for m in (embed, gru, head) for p in m.parameters()]
optimizer = torch.optim.Adam(parameters)
losses = []
for _ in range(250):
    tokens = torch.randint(0, 1000, (8, random.randint(8, 96)))
    out, _ = gru(embed(tokens))
    loss = nn.functional.cross_entropy(head(out).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(sum(losses) / len(losses))
