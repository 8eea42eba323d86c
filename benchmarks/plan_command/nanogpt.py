"""A small GPT in nanoGPT's shape: 124 million parameters, 1,024 tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memfit import Job

VOCABULARY, LENGTH, WIDTH, NUM_LAYERS, NUM_HEADS = 50_304, 1024, 768, 12, 12


class Attention(nn.Module):
    """Causal self-attention, fused."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Mix positions of x (B, T, WIDTH)."""
        parts = self.c_attn(x).split(WIDTH, dim=2)
        q, k, v = (p.view(*x.shape[:2], NUM_HEADS, -1).transpose(1, 2) for p in parts)
        dropout = 0.1 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.drop(self.c_proj(y.transpose(1, 2).reshape(x.shape)))


class Block(nn.Module):
    """Attention and a perceptron, each added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream (B, T, WIDTH)."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A decoder whose head shares the embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.h = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (B, T, VOCABULARY) of token ids (B, T)."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.drop(self.wte(ids) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
    """Make tokens (B, T) and the next ones."""
    ids = torch.randint(0, VOCABULARY, (batch_size, LENGTH + 1))
    return ids[:, :-1], ids[:, 1:]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy."""
    ids, targets = batch
    return F.cross_entropy(model(ids).flatten(0, 1), targets.reshape(-1))


job = Job(
    model=GPT,
    batch=make_batch,
    loss=loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=6e-4),
    batch_size=12,
)
