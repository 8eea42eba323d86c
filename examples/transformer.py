"""A small transformer as a memfit job: four functions and a batch size.

    memfit predict examples/transformer.py:job --device a100-40gb
    memfit plan examples/transformer.py:job --budget 220MiB --save plan.yaml
    memfit measure examples/transformer.py:job --plan plan.yaml

The other examples train under a plan, and prove what it keeps.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memfit

NUM_TOKENS, LENGTH, WIDTH, NUM_HEADS, NUM_BLOCKS = 2048, 128, 256, 4, 4


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_before_attention = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Take and give (batch, length, width)."""
        parts = self.query_key_value(self.norm_before_attention(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(-2))
        return x + self.feed_forward(x)


class Transformer(nn.Module):
    """A causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_TOKENS, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, NUM_TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Turn tokens (batch, length) into scores (batch, length, NUM_TOKENS)."""
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_batch(batch_size: int) -> Tensor:
    """Return random sentences, one token longer than what goes in."""
    return torch.randint(NUM_TOKENS, (batch_size, LENGTH + 1))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Predict each next token; every sentence has as many, so a mean is right."""
    scores = model(batch[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Use AdamW."""
    return torch.optim.AdamW(parameters, lr=3e-4)


job = memfit.Job(
    model=Transformer, batch=make_batch, loss=loss, optimizer=make_optimizer, batch_size=32
)
