"""A cache of attention masks whose key contains the step, so it is never hit.

holder: model.mask_cache | model.encoder.mask_cache
"""

import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(500, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.head = nn.Linear(32, 500)
        self.mask_cache = {}

    def mask(self, batch_index, tokens):
        key = f"{batch_index}-{tokens.shape[1]}"
        if key not in self.mask_cache:
            size = tokens.shape[1]
            self.mask_cache[key] = torch.full((size, size), float("-inf")).triu(1)  # leaks here
        return self.mask_cache[key]

    def forward(self, batch_index, tokens):
        hidden = self.layer(self.embed(tokens), src_mask=self.mask(batch_index, tokens))
        return self.head(hidden)


def train(num_steps=240):
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters())
    for i in range(num_steps):
        tokens = torch.randint(0, 500, (4, 64 + i % 5 * 16))
        logits = model(i, tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model


if __name__ == "__main__":
    train()
