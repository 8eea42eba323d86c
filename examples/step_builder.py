"""A CUDA training script as it is, predicted without a GPU: it has a function that builds a step.

    memfit predict examples/step_builder.py:build --device t4
    memfit predict examples/step_builder.py:build --device t4 --device rtx-4090 --device h100-80gb
    memfit predict examples/step_builder.py:build --device t4 --html step.html

Nothing here knows of memfit. `build` makes model, optimizer and batch and gives a function that
does one step; training calls it as well. Run it as a script where there is a GPU.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH_SIZE, NUM_CLASSES, NUM_PIXELS = 64, 100, 64


def make_model() -> nn.Sequential:
    """Build a small convolutional network."""
    widths = (3, 64, 128, 256)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, NUM_CLASSES)
    )


def build() -> Callable[[], Tensor]:
    """Put everything on the GPU and give a function that does one training step."""
    model = make_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = torch.randn(BATCH_SIZE, 3, NUM_PIXELS, NUM_PIXELS, device="cuda")
    labels = torch.randint(NUM_CLASSES, (BATCH_SIZE,), device="cuda")

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


if __name__ == "__main__":
    one_step = build()
    for _ in range(10):
        found = one_step()
    print(f"loss {found.item():.3f}")
    print(f"peak {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB")
