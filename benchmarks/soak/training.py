"""A plain training of very many tiny steps, as anybody would write it, that notes its memory.

python -m soak.training SAMPLES NUM_STEPS EVERY
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from soak.sampling import Samples

WIDTH, BATCH_SIZE = 32, 16


def build_model() -> nn.Module:
    """Build a perceptron."""
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 1))


def main(path: str, num_steps: int, every: int) -> None:
    """Train on random batches."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = Samples(Path(path), num_steps, every)
    for step in range(1, num_steps + 1):
        batch = torch.randn(BATCH_SIZE, WIDTH)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        samples.take(step)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
