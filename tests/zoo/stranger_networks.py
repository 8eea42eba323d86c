"""Networks of convolutions in the styles of public repositories, written without the tiling in mind."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class PaddedUNet(nn.Module):
    """As in many segmentation tutorials: upsampled maps are padded to the size of the skip."""

    def __init__(self):
        super().__init__()
        self.one = _double(3, 8)
        self.two = _double(8, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.join = _double(16, 8)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        one = self.one(x)
        up = self.up(self.two(F.max_pool2d(one, 2)))
        down, right = one.size(2) - up.size(2), one.size(3) - up.size(3)
        up = F.pad(up, [right // 2, right - right // 2, down // 2, down - down // 2])
        return self.out(self.join(torch.cat([one, up], 1)))


class FrozenStatistics(nn.Module):
    """Batch norms in evaluation mode, writing activations."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, 1, 2, dilation=2, groups=4), nn.BatchNorm2d(8), nn.LeakyReLU(0.1),
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), nn.Conv2d(8, 3, 5, padding=2),
        )  # fmt: skip
        for norm in (self.body[1], self.body[4]):
            norm.eval()
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)

    def forward(self, x):
        return self.body(x)


class SuperResolution(nn.Module):
    """Residual blocks with a scale, pixel shuffle and a global skip."""

    def __init__(self):
        super().__init__()
        self.head = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.PReLU(8), nn.Conv2d(8, 8, 3, padding=1))
            for _ in range(3)
        )
        self.tail = nn.Sequential(
            nn.Conv2d(8, 12, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(3, 3, 3, padding=1)
        )

    def forward(self, x):
        y = head = self.head(x)
        for block in self.blocks:
            y = y + 0.1 * block(y)
        return self.tail(y + head) + F.interpolate(x, scale_factor=2, mode="nearest")


class SqueezeExcitation(nn.Module):
    """Channels weighed by what the whole picture holds."""

    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(3, 8, 3, padding=1)
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 2, 1), nn.SiLU(), nn.Conv2d(2, 8, 1), nn.Sigmoid()
        )
        self.two = nn.Conv2d(8, 3, 3, padding=1, padding_mode="reflect")

    def forward(self, x):
        y = F.hardswish(self.one(x))
        return self.two(y * self.gate(y))


class PyramidPooling(nn.Module):
    """Dilated branches beside the mean of all positions, as DeepLab has them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 7, stride=2, padding=3)
        self.branches = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=d, dilation=d) for d in (1, 3, 6))
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1))
        self.out = nn.Conv2d(16, 2, 1)

    def forward(self, x):
        size = x.shape[-2:]
        x = F.max_pool2d(self.stem(x).relu(), 3, 2, 1, ceil_mode=True)
        found = [branch(x) for branch in self.branches]
        pooled = F.interpolate(
            self.pool(x), size=x.shape[-2:], mode="bilinear", align_corners=False
        )
        return F.interpolate(
            self.out(torch.cat([*found, pooled], dim=1)),
            size=size,
            mode="bilinear",
            align_corners=False,
        )


class TimeConditioned(nn.Module):
    """A residual block of a diffusion model: a scale and a shift from a vector, and attention."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(4, 8, eps=1e-6) for _ in range(3))
        self.stem, self.one, self.two = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
        )
        self.time = nn.Linear(5, 16)
        self.qkv, self.out = nn.Conv2d(8, 24, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x):
        t = torch.linspace(0, 1, 5, dtype=x.dtype).expand(len(x), -1)
        y = self.one(F.silu(self.norms[0](self.stem(x))))
        scale, shift = self.time(t)[:, :, None, None].chunk(2, dim=1)
        y = y + self.two(F.silu(self.norms[1](y) * (1 + scale) + shift))
        q, k, v = self.qkv(self.norms[2](y)).flatten(2).transpose(1, 2).chunk(3, dim=-1)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).unflatten(2, y.shape[2:])
        return self.out(y + seen)


class SharedPyramid(nn.Module):
    """One head over levels of different sizes; a dictionary of results."""

    def __init__(self):
        super().__init__()
        self.levels = nn.ModuleList(nn.Conv2d(i, 8, 3, stride=2, padding=1) for i in (3, 8, 8))
        self.laterals = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(3))
        self.head = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.GELU("tanh"), nn.Conv2d(8, 2, 3, padding=1)
        )

    def forward(self, x):
        found = []
        for level in self.levels:
            x = level(x).relu()
            found.append(x)
        merged = [self.laterals[2](found[2])]
        for lateral, level in ((self.laterals[1], found[1]), (self.laterals[0], found[0])):
            merged.append(lateral(level) + F.interpolate(merged[-1], size=level.shape[-2:]))
        return {f"p{n}": self.head(each) for n, each in enumerate(merged)}


class AttentionGate(nn.Module):
    """A skip that is multiplied by a gate from below."""

    def __init__(self):
        super().__init__()
        self.enter, self.down = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 8, 2, stride=2)
        self.norm = nn.InstanceNorm3d(8, affine=True)
        self.gate, self.skip = nn.Conv3d(8, 4, 1), nn.Conv3d(4, 4, 1, bias=False)
        self.psi = nn.Conv3d(4, 1, 1)
        self.up = nn.ConvTranspose3d(8, 4, 3, stride=2, padding=1, output_padding=1)
        self.out = nn.Conv3d(8, 1, 3, padding=1)

    def forward(self, x):
        skip = F.elu(self.enter(x))
        low = F.leaky_relu(self.norm(self.down(skip)), 0.01)
        gate = F.interpolate(self.gate(low), skip.shape[2:], mode="trilinear", align_corners=False)
        weight = torch.sigmoid(self.psi(F.relu(gate + self.skip(skip))))
        up = F.interpolate(self.up(low), skip.shape[2:], mode="nearest-exact")
        return self.out(torch.cat((skip * weight, up), 1)).clamp(-3, 3)


class Audio(nn.Module):
    """One dimension: strided encoder and decoder with a gated linear unit and weight norm."""

    def __init__(self):
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.encode = norm(nn.Conv1d(1, 8, 8, stride=4))
        self.gated = nn.Conv1d(8, 16, 1)
        self.decode = norm(nn.ConvTranspose1d(8, 1, 8, stride=4))

    def forward(self, x):
        length = x.shape[-1]
        y = F.glu(self.gated(F.relu(self.encode(x))), dim=1)
        y = self.decode(y)
        return F.pad(y, (0, max(0, length - y.shape[-1])))[..., :length]


class Shifted(nn.Module):
    """Rolls positions, flips them and takes a cumulative sum: nothing of it stays in its rows."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (
            nn.Conv2d(2, 4, 3, padding=1),
            nn.Conv2d(4, 2, 3, padding=1, padding_mode="circular"),
        )

    def forward(self, x):
        y = torch.roll(self.one(x), (3, 2), dims=(2, 3)).flip(2)
        return self.two(y.cumsum(3) / y.shape[3]) + x.flip(3)


class Positions(nn.Module):
    """Adds coordinates, a parameter for every position, and normalises over the picture."""

    def __init__(self, height=31, width=45):
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 2, 3, padding=1)
        self.place = nn.Parameter(torch.randn(1, 6, height, width) * 0.1)

    def forward(self, x):
        rows = (
            torch.linspace(-1, 1, x.shape[2], dtype=x.dtype)
            .view(1, 1, -1, 1)
            .expand(len(x), 1, -1, x.shape[3])
        )
        y = self.one(torch.cat([x, rows], 1)) + self.place
        y = (y - y.mean((2, 3), keepdim=True)) / (y.std((2, 3), keepdim=True) + 1e-5)
        return self.two(y).softmax(1)


class TwiceThrough(nn.Module):
    """The same layers twice, and a product of two of their results."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 3, 3, padding=1)
        )

    def forward(self, x):
        first = self.net(x)
        second = self.net(first)
        return first * second, torch.where(second > 0, first, -second), torch.maximum(first, second)


class UnevenPools(nn.Module):
    """Pools that leave rows out, count no padding, or give other sizes than halves."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (
            nn.Conv2d(2, 4, (5, 3), padding=(2, 1)),
            nn.Conv2d(4, 2, (1, 7), padding=(0, 3)),
        )

    def forward(self, x):
        y = F.avg_pool2d(self.one(x), 3, stride=2, padding=1, count_include_pad=False)
        y = F.max_pool2d(y, (3, 2), stride=(2, 3), padding=(1, 0), ceil_mode=True)
        return F.interpolate(self.two(y), scale_factor=(1.7, 2.3), mode="bilinear")


def _double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.ReLU(),
    )  # fmt: skip


def stranger_networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Return each network with the shape of its input."""
    return {
        "padded-unet": (PaddedUNet(), (2, 3, 37, 43)),
        "frozen-statistics": (FrozenStatistics(), (2, 3, 33, 47)),
        "super-resolution": (SuperResolution(), (1, 3, 23, 31)),
        "squeeze-excitation": (SqueezeExcitation(), (2, 3, 29, 41)),
        "pyramid-pooling": (PyramidPooling(), (2, 3, 65, 51)),
        "time-conditioned": (TimeConditioned(), (2, 3, 17, 13)),
        "shared-pyramid": (SharedPyramid(), (2, 3, 45, 61)),
        "attention-gate": (AttentionGate(), (2, 1, 9, 17, 13)),
        "audio": (Audio(), (2, 1, 203)),
        "shifted": (Shifted(), (2, 2, 19, 27)),
        "positions": (Positions(), (2, 3, 31, 45)),
        "twice-through": (TwiceThrough(), (2, 3, 21, 27)),
        "uneven-pools": (UnevenPools(), (2, 2, 41, 39)),
    }
