"""Jobs that the engines are recorded on; with another optimizer than AdamW's defaults, see below.

AdamW divides by ``sqrt(v) + eps``. With eps at 1e-8 a gradient that is zero but for rounding moves
its weight by a whole learning rate, in whichever direction rounding points, so that two exact ways
to the same sum differ by as much. An eps of 1e-4 leaves what is compared to the sums themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from ranks.rank_steps import Block, Perceptron, vectors
from torch import Tensor, nn

from memfit import Job, Total

_VOCABULARY, _LENGTH, _WIDTH = 1024, 64, 128
_LEFT_OUT = -100


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return AdamW with an eps that rounding does not reach."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)


def _loss(model: Any, batch: Any) -> Tensor:
    return model(batch)


def _perceptron() -> Perceptron:
    return Perceptron(width=_WIDTH, inner=512)


def _vectors(batch_size: int) -> Tensor:
    return vectors(batch_size, _WIDTH)


perceptron = Job(
    model=_perceptron,
    batch=_vectors,
    loss=_loss,
    optimizer=adamw,
    batch_size=16,
    clip_grad_norm=0.5,
)


class TiedDecoder(nn.Module):
    """A small language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList([Block(_WIDTH) for _ in range(4)])
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next tokens."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sentences(batch_size: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, of which each sentence counts other ones."""
    tokens = torch.randint(_VOCABULARY, (batch_size, _LENGTH))
    targets = tokens.roll(-1, 1)
    lengths = torch.randint(4, _LENGTH, (batch_size, 1))
    return tokens, targets.masked_fill(torch.arange(_LENGTH) >= lengths, _LEFT_OUT)


def mean_of_counted(model: Any, batch: tuple[Tensor, Tensor]) -> Total:
    """Return the sum over the tokens that count, and how many those are."""
    tokens, targets = batch
    logits = model(tokens).flatten(0, 1)
    lost = nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
    return Total(lost, (targets != _LEFT_OUT).sum())


decoder = Job(
    model=TiedDecoder,
    batch=sentences,
    loss=mean_of_counted,
    optimizer=adamw,
    batch_size=16,
    clip_grad_norm=0.5,
)
