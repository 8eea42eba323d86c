"""Jobs whose pages are measured: one of three modules, one of two thousand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

import memfit

_WIDTH = 64
_NUM_BLOCKS = 400


class Block(nn.Module):
    """Four modules in a row beside a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the four make of the input."""
        return x + self.down(self.act(self.up(self.norm(x))))


def _batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, _WIDTH), torch.randint(0, 10, (size,))


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _job(body: Callable[[], Sequence[nn.Module]]) -> memfit.Job:
    return memfit.Job(
        model=lambda: nn.Sequential(*body(), nn.Linear(_WIDTH, 10)),
        batch=_batch,
        loss=_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=256,
    )


small = _job(lambda: [nn.Linear(_WIDTH, _WIDTH), nn.ReLU()])
large = _job(lambda: [Block() for _ in range(_NUM_BLOCKS)])
