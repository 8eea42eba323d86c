"""Networks of convolutions of the kinds that public code has."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    """Return two convolutions, each with a group norm and a ReLU that overwrites."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(4, outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.GroupNorm(4, outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """A U-Net with pools, a transposed convolution, resizing and skips; it has two outputs."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = double_convolution(3, width)
        self.down_again = double_convolution(width, 2 * width)
        self.middle = double_convolution(2 * width, 4 * width)
        self.up = nn.ConvTranspose2d(4 * width, 2 * width, 3, stride=2, padding=1, output_padding=1)
        self.join = nn.Conv2d(4 * width, 2 * width, 3, padding=1)
        self.norm = nn.InstanceNorm2d(2 * width, affine=True)
        self.join_again = double_convolution(3 * width, width)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x):
        first = self.down(x)
        second = self.down_again(F.max_pool2d(first, 2))
        middle = self.middle(F.avg_pool2d(second, 2))
        up = F.interpolate(self.up(middle), size=second.shape[2:])
        joined = self.norm(self.join(torch.cat([up, second], 1)))
        joined = F.interpolate(joined, size=first.shape[2:], mode="bilinear", align_corners=True)
        return self.head(self.join_again(torch.cat([joined, first], 1))), middle.mean((2, 3))


class UNet3d(nn.Module):
    """A U-Net over space and time with trilinear resizing."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv3d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.LeakyReLU(0.1)
        )
        self.middle = nn.Sequential(
            nn.Conv3d(4, 8, 3, stride=2, padding=1), nn.InstanceNorm3d(8), nn.SiLU()
        )
        self.head = nn.Conv3d(12, 1, 3, padding=1)

    def forward(self, x):
        down = self.down(x)
        middle = F.interpolate(self.middle(down), size=down.shape[2:], mode="trilinear")
        return self.head(torch.cat([down, middle], dim=1))


class Residual(nn.Module):
    """Residual blocks with frozen batch norms, a strided start, a pool and a positional term."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(8).eval()
        self.place = nn.Parameter(torch.randn(1, 8, 10, 13))
        self.first = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4)
        self.second = nn.Conv2d(8, 8, (1, 5), padding="same")
        self.prelu = nn.PReLU()
        self.classes = nn.Linear(8, 3)

    def train(self, mode: bool = True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.start(x))), 3, stride=2, padding=1)
        x = x + self.place
        x = x + self.second(self.prelu(self.first(x))) * 0.5
        return self.classes(x.mean(dim=(2, 3)))


class ConvNeXt(nn.Module):
    """Depthwise convolutions with layer norms and MLPs over channels, and squeezed gates."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.depthwise = nn.Conv2d(8, 8, 7, padding=3, groups=8)
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.scale = nn.Parameter(torch.full((8,), 0.1))
        self.gate = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        x = self.patches(x)
        inner = self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1))) * self.scale
        x = x + inner.permute(0, 3, 1, 2)
        return x * torch.sigmoid(self.gate(F.adaptive_avg_pool2d(x, 1)))


class WaveNet(nn.Module):
    """Dilated causal convolutions over time with gates."""

    def __init__(self) -> None:
        super().__init__()
        self.dilated = nn.ModuleList(nn.Conv1d(6, 12, 2, dilation=d) for d in (1, 2, 4))
        self.mixing = nn.ModuleList(nn.Conv1d(6, 6, 1) for _ in range(3))

    def forward(self, x):
        skips = 0
        for convolution, mixing in zip(self.dilated, self.mixing, strict=True):
            both = convolution(F.pad(x, (convolution.dilation[0], 0)))
            values, gates = both.chunk(2, dim=1)
            skip = mixing(torch.tanh(values) * torch.sigmoid(gates))
            x, skips = x + skip, skips + skip
        return skips


class Generator(nn.Module):
    """Transposed convolutions from a small map to an image."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(6, 8, 4, stride=2, padding=1),
            nn.InstanceNorm2d(8),
            nn.ReLU(),
            nn.Upsample(scale_factor=1.7, mode="bilinear"),
            nn.Conv2d(8, 8, 3),
            nn.ELU(),
            nn.ConvTranspose2d(8, 3, 3, stride=3, dilation=2, groups=1),
            nn.Upsample(scale_factor=(2, 1), mode="nearest-exact"),
            nn.Conv2d(3, 3, 2),
            nn.Tanh(),
        )

    def forward(self, x):
        return self.layers(x)


class Conditioned(nn.Module):
    """A diffusion-like block: standardised weights, and norms whose scale comes from a time."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv2d(3, 8, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(8, 8, 3, 3))
        self.embedding = nn.Linear(4, 16)
        self.head = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x):
        time = x.mean((2, 3)).repeat(1, 2)[:, :4]
        scale, shift = self.embedding(time).mean(0).chunk(2)
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True)
        x = F.silu(F.group_norm(self.start(x), 2, scale, shift))
        x = x + F.conv2d(x, (self.weight - mean) * (variance + 1e-5).rsqrt(), padding=1)
        kernel = F.adaptive_avg_pool2d(x, 3).mean(0, keepdim=True).transpose(0, 1)
        return self.head(F.conv2d(x, kernel, padding=1, groups=8))


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Return networks with the shapes of their inputs."""
    return {
        "unet": (UNet(), (2, 3, 37, 51)),
        "unet-3d": (UNet3d(), (1, 2, 7, 11, 19)),
        "residual": (Residual(), (2, 3, 37, 51)),
        "convnext": (ConvNeXt(), (2, 3, 44, 60)),
        "conditioned": (Conditioned(), (2, 3, 21, 34)),
        "wavenet": (WaveNet(), (2, 6, 71)),
        "generator": (Generator(), (2, 6, 9, 7)),
    }
