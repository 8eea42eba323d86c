"""Models of which parts are frozen, as public training code has them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit import Job

WIDTH = 32


def no_change(block, hidden):
    del block
    return hidden


def written_through_data(block, hidden):
    block.up.weight.data.clamp_(-0.01, 0.01)
    return hidden


def written_in_place(block, hidden):
    with torch.no_grad():
        block.up.weight.clamp_(-0.01, 0.01)
    return hidden


class Adapted(nn.Module):
    """A frozen MLP with dropout in training mode, a trained adapter beside it, and a buffer."""

    def __init__(self, width: int = WIDTH, *, change=no_change, recomputes: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)
        self.requires_grad_(False)
        self.into = nn.Linear(width, 4, bias=False)
        self.out = nn.Linear(4, 2 * width, bias=False)
        self.register_buffer("mask", torch.ones(width))
        self.change, self.recomputes = change, recomputes

    def forward(self, x):
        hidden = self.change(self, self.norm(x)) * self.mask
        if self.recomputes:
            return x + checkpoint(self.mlp, hidden, use_reentrant=False)
        return x + self.mlp(hidden)

    def mlp(self, hidden):
        inner = self.up(hidden) + self.out(self.into(hidden))
        return self.down(self.dropout(torch.relu(inner)))


class DirectlyRead(Adapted):
    """Read the weights of its layers without calling these."""

    def mlp(self, hidden):
        inner = F.linear(hidden, self.up.weight) + self.out(self.into(hidden))
        return F.linear(torch.relu(inner), self.down.weight)


class Stack(nn.Module):
    """Some blocks, each called once or more, and an output that may read weights of the blocks."""

    def __init__(self, block=Adapted, *, num_calls: int = 1, reads: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)
        self.num_calls, self.reads = num_calls, reads

    def forward(self, x):
        for block in self.blocks:
            for _ in range(self.num_calls):
                x = block(x)
        if self.reads:
            x = x + F.linear(F.linear(x, self.blocks[0].up.weight), self.blocks[1].down.weight)
        return self.head(x)


class SharedBlock(Stack):
    """One block, in several places."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0]] * 3)


class HalfFrozen(nn.Module):
    """A CNN whose first stages are frozen, with batch normalisation in evaluation or training."""

    def __init__(self, *, trains_statistics: bool = False) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2)
            )
            for _ in range(4)
        ).to(memory_format=torch.channels_last)
        self.head = nn.Linear(4, 2)
        self.stages[:2].requires_grad_(False)
        for stage in self.stages:
            stage[1].train(trains_statistics)

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


class TiedDecoder(nn.Module):
    """A frozen embedding, which is the output layer as well."""

    def __init__(self, *, reads_weight: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, WIDTH)
        self.blocks = nn.ModuleList(Adapted() for _ in range(2))
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.embedding.requires_grad_(False)
        self.reads_weight = reads_weight

    def forward(self, ids):
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(hidden, self.embedding.weight) if self.reads_weight else self.head(hidden)


class Recurrent(nn.Module):
    """Frozen recurrent layers, which hold their weights in a list besides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(3))
        self.layers.requires_grad_(False)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x, _ = layer(x)
        return x


def job_of(model, batch=lambda size: torch.randn(size, WIDTH)) -> Job:
    """Return a job that trains with AdamW, which is given the frozen weights as well."""
    return Job(
        model=model,
        batch=batch,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(list(parameters), lr=1e-2),
        batch_size=8,
    )


def images(size):
    return torch.randn(size, 4, 8, 8)


def words(size):
    return torch.randint(0, 40, (size, 5))


def sequences(size):
    return torch.randn(size, 5, WIDTH)
