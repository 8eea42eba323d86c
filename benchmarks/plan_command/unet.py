"""A U-Net with batch normalisation that segments pictures of 256 x 256."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memfit import Job

WIDTHS = (64, 128, 256, 512)


def double(num_inputs: int, num_outputs: int) -> nn.Sequential:
    """Return two convolutions, each normalised."""
    layers: list[nn.Module] = []
    for width in (num_inputs, num_outputs):
        layers += [nn.Conv2d(width, num_outputs, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(num_outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class Unet(nn.Module):
    """Down four times and up four times, with skips across."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            double(before, width) for before, width in zip((3, *WIDTHS), WIDTHS, strict=False)
        )
        self.bottom = double(WIDTHS[-1], 2 * WIDTHS[-1])
        widths = WIDTHS[::-1]
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths)
        self.up = nn.ModuleList(double(2 * w, w) for w in widths)
        self.head = nn.Conv2d(WIDTHS[0], 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (B, 2, H, W) of pictures (B, 3, H, W)."""
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([skips.pop(), grow(x)], dim=1))
        return self.head(x)


def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
    """Make pictures (B, 3, 256, 256) and masks (B, 256, 256)."""
    return torch.randn(batch_size, 3, 256, 256), torch.randint(0, 2, (batch_size, 256, 256))


job = Job(
    model=Unet,
    batch=make_batch,
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
    batch_size=32,
)
