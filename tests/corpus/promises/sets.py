"""Losses over a set whose members couple in ``prepare``, or do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.corpus.promises.case import CASES, make_job
from torch import Tensor, nn

from memfit import Job
from memfit.losses import softmax_mean

NUM_MEMBERS, WIDTH = 1200, 16


class Set(nn.Module):
    """A network over members, and the members."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.members = nn.Parameter(torch.randn(NUM_MEMBERS, WIDTH))
        self.network = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), *inner, nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the log-sum-exp (B,) of products with all prepared members."""

        def terms(prepared: Tensor, samples: Tensor) -> tuple[Tensor, ...]:
            return (samples @ prepared.T / WIDTH,)

        def prepare(members: Tensor) -> tuple[Tensor, ...]:
            return (self.network(members),)

        return softmax_mean(terms, (self.members,), (x,), prepare=prepare).log_sum_exp


class Each(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function."""
        return self.function(x)


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def _members(inner: Callable[[], nn.Module]) -> Callable[[], Job]:
    def build() -> Job:
        return make_job(lambda: Set(inner()), lambda size: torch.randn(size, WIDTH), _loss)

    return build


def _still(module: Any) -> nn.Module:
    return module.eval()


for _name, _inner in {
    # members stay apart
    "set_plain": nn.Identity,
    "set_layer_norm": lambda: nn.LayerNorm(64),
    "set_still_batch_norm": lambda: Each(_still(nn.BatchNorm1d(64)).forward),
    "set_gate": lambda: Each(lambda x: x * x.sigmoid()),
    # members meet
    "set_batch_norm": lambda: nn.BatchNorm1d(64),
    "set_centred": lambda: Each(lambda x: x - x.mean(0)),
    "set_softmax": lambda: Each(lambda x: x * x.softmax(0) * len(x)),
    "set_sum": lambda: Each(lambda x: x.cumsum(0) / len(x)),
    "set_sorted": lambda: Each(lambda x: x.sort(0).values),
    "set_neighbours": lambda: Each(lambda x: x + x.roll(1, 0)),
    "set_numbered": lambda: Each(lambda x: x + torch.arange(len(x)).to(x)[:, None] / 1000),
    "set_by_length": lambda: Each(lambda x: x * (len(x) / 1000)),
}.items():
    CASES[_name] = _members(_inner)
