"""Lengths grow over the first half and stay; positions are cached by length, as many models do."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(200, 48)
        self.layer = nn.TransformerEncoderLayer(48, 2, 96, batch_first=True)
        self.head = nn.Linear(48, 200)
        self.tables = {}

    def table(self, length):
        if length not in self.tables:
            angle = torch.arange(length)[:, None] / 1000 ** (torch.arange(48) / 48)
            self.tables[length] = (angle.sin(), torch.full((length, length), -1e9).triu(1))
        return self.tables[length]

    def forward(self, tokens):
        positions, mask = self.table(tokens.shape[1])
        return self.head(self.layer(self.embed(tokens) + positions, src_mask=mask))


model = Model()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(320):
    length = min(16 + step // 10 * 8, 144)
    tokens = torch.randint(0, 200, (4, length))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
