"""The entry of the strategy that fuses attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.zoo.small_jobs import regression_job
from torch import nn

from memfit import Job, Total
from memfit.strategies.fused_attention import FusedAttention

from .builders import Entry, residual, sgd


class AttentionBlock(nn.Module):
    """Attention that gives weights nobody wants, and a wide layer after it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.wide = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x, padding=None, mask=None):
        y = self.norm(x)
        attended, _ = self.attention(y, y, y, key_padding_mask=padding, attn_mask=mask)
        x = x + attended
        return x + self.wide(x)


class CausalLanguageModel(nn.Module):
    """Attend to earlier tokens that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(AttentionBlock(16) for _ in range(2))
        self.head = nn.Linear(16, 11)

    def forward(self, ids, padding):
        later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).triu(1)
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden, padding, later)
        return self.head(hidden)


def attention_blocks(width: int = 16, num_tokens: int = 7, batch_size: int = 6) -> Job:
    """Return blocks that attend to all tokens."""
    blocks = lambda: nn.Sequential(*(AttentionBlock(width) for _ in range(3)))  # noqa: E731
    return regression_job(blocks, (num_tokens, width), batch_size=batch_size)


def large_attention_blocks() -> Job:
    return attention_blocks(width=64, num_tokens=256, batch_size=8)


def padded_language_model() -> Job:
    """Return padded sequences of different lengths to a causal model."""

    def batch(size):
        ids = torch.randint(0, 11, (size, 9))
        lengths = torch.randint(3, 10, (size, 1))
        return {"ids": ids, "padding": torch.arange(9) >= lengths}

    def loss(model, batch):
        logits = model(batch["ids"], batch["padding"])
        targets = torch.where(batch["padding"], -100, batch["ids"])
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return Total(total, (targets != -100).sum())

    return Job(model=CausalLanguageModel, batch=batch, loss=loss, optimizer=sgd, batch_size=5)


ENTRIES: tuple[Entry, ...] = (
    Entry(
        strategy=FusedAttention,
        settings=(FusedAttention(),),
        jobs=(attention_blocks, padded_language_model),
        large_job=large_attention_blocks,
        large_settings=(FusedAttention(),),
        refusal=(FusedAttention(), residual, "writes attention out itself"),
    ),
)
