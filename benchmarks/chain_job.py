"""The chain of 16 transformer blocks that plans are compared with torch's own remedies on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from memfit import Job

_NUM_BLOCKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the job is, and how often it is timed."""

    width: int
    num_tokens: int
    batch_size: int
    num_heads: int
    dtype: torch.dtype
    num_first: int
    """Steps before: checkpoints of memfit's look at every operator in the first, second, fourth."""
    num_timed: int
    """Steps that are timed together."""


SIZES = {
    "cpu": Sizes(
        width=256,
        num_tokens=512,
        batch_size=4,
        num_heads=4,
        dtype=torch.float32,
        num_first=2,
        num_timed=1,
    ),
    "cuda": Sizes(
        width=1024,
        num_tokens=1024,
        batch_size=16,
        num_heads=16,
        dtype=torch.bfloat16,
        num_first=4,
        num_timed=3,
    ),
}


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, self._num_heads = sizes.width, sizes.num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply attention and MLP. Shape (batch, tokens, width)."""
        batch, tokens, width = x.shape
        parts = self.project_in(self.attention_norm(x))
        parts = parts.view(batch, tokens, 3, self._num_heads, width // self._num_heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.project_out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """A chain of blocks and a linear head over the mean of the tokens."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(sizes) for _ in range(_NUM_BLOCKS))
        self.head = nn.Linear(sizes.width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classify. Shapes (batch, tokens, width) to (batch, 10)."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def build_job(sizes: Sizes = SIZES["cpu"]) -> Job:
    """Build the job."""
    return Job(
        model=lambda: Transformer(sizes).to(sizes.dtype),
        batch=lambda size: (
            torch.randn(size, sizes.num_tokens, sizes.width, dtype=sizes.dtype),
            torch.randint(0, 10, (size,)),
        ),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
        batch_size=sizes.batch_size,
        name="16 blocks",
    )
