"""Embeddings in bags: what the CPU's kernels take beside gradients, held against the allocator."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memfit

pytestmark = pytest.mark.slow


class Bags(nn.Module):
    """Bags that begin at numbers of their own."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(300, 16, mode=mode)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Gather bags of two."""
        return self.bags(numbers.flatten(), torch.arange(0, numbers.numel(), 2))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("make", [nn.EmbeddingBag, Bags], ids=["rows", "offsets"])
def test_bags_are_predicted_to_the_byte(mode, make):
    job = memfit.Job(
        model=lambda: make(mode) if make is Bags else make(300, 16, mode=mode),
        batch=lambda size: torch.randint(0, 300, (size, 4)),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=32,
    )

    measured = memfit.measure(job)

    assert measured.predicted_peak_bytes == measured.peak_allocated_bytes
