"""Architectures for images, clips and sound, and the blocks that all of them are made of."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Stack(nn.Module):
    """Blocks in a row, recomputed in the backward one by one where that is switched on."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.recomputes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply all blocks."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x


class Recomputing(nn.Module):
    """A model whose stacks can be told to recompute."""

    def set_grad_checkpointing(self) -> None:
        """Have every stack recompute its blocks in the backward."""
        for module in self.modules():
            if isinstance(module, Stack):
                module.recomputes = True


class Chain(Recomputing):
    """Modules applied one after another."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply all parts."""
        return self.parts(x)


class Residual(nn.Module):
    """Add what the inner module gives to its input."""

    def __init__(self, inner: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.shortcut = shortcut or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply both ways and add."""
        return self.inner(x) + self.shortcut(x)


class Rearrange(nn.Module):
    """Move the channels of images last, or first again."""

    def __init__(self, *order: int) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Permute the dimensions."""
        return x.permute(self.order)


class Mean(nn.Module):
    """Average over one dimension."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Average."""
        return x.mean(self.dim)


def mlp(width: int = 4096, depth: int = 6, num_classes: int = 1000) -> nn.Module:
    """Build linear layers with GELU and dropout."""
    hidden = [
        nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth)
    ]
    return Chain(nn.Linear(1024, width), Stack(*hidden), nn.Linear(width, num_classes))


def _conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> Any:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    )


def cnn(width: int = 64, num_classes: int = 100) -> nn.Module:
    """Build a plain convolutional classifier with pooling and a wide linear head."""
    layers: list[nn.Module] = []
    channels = 3
    for step in range(4):
        outputs = width * 2**step
        layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs)]
        layers += [nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        channels = outputs
    head = (nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(channels * 16, 1024), nn.ReLU())
    return Chain(*layers, *head, nn.Dropout(0.5), nn.Linear(1024, num_classes))


def resnet(depths: tuple[int, ...] = (3, 4, 6, 3), num_classes: int = 1000) -> nn.Module:
    """Build bottleneck blocks with batch normalisation in four stages."""
    layers: list[nn.Module] = [_conv_norm(3, 64, 7, 2), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        blocks = []
        for index in range(depth):
            stride = 2 if stage and not index else 1
            blocks.append(_bottleneck(channels, width, stride))
            channels = 4 * width
        layers.append(Stack(*blocks))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))
    return Chain(*layers, *head)


def _bottleneck(channels: int, width: int, stride: int) -> nn.Module:
    inner = nn.Sequential(
        _conv_norm(channels, width, 1),
        nn.ReLU(inplace=True),
        _conv_norm(width, width, 3, stride),
        nn.ReLU(inplace=True),
        _conv_norm(width, 4 * width, 1),
    )
    is_same = stride == 1 and channels == 4 * width
    shortcut = None if is_same else _conv_norm(channels, 4 * width, 1, stride)
    return nn.Sequential(Residual(inner, shortcut), nn.ReLU(inplace=True))


def mobilenet(width: int = 32, depth: int = 12, num_classes: int = 1000) -> nn.Module:
    """Build inverted residual blocks with depthwise convolutions."""
    layers: list[nn.Module] = [_conv_norm(3, width, 3, 2), nn.Hardswish(inplace=True)]
    channels = width
    for index in range(depth):
        outputs, stride = width * (1 + index // 2), 2 if index in {2, 5, 9} else 1
        inner = nn.Sequential(
            _conv_norm(channels, 6 * channels, 1),
            nn.Hardswish(inplace=True),
            _conv_norm(6 * channels, 6 * channels, 3, stride, groups=6 * channels),
            nn.Hardswish(inplace=True),
            _conv_norm(6 * channels, outputs, 1),
        )
        layers.append(Residual(inner) if stride == 1 and channels == outputs else inner)
        channels = outputs
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))
    return Chain(*layers, *head)


def convnext(width: int = 96, depth: int = 9, num_classes: int = 1000) -> nn.Module:
    """Build blocks of a 7x7 depthwise convolution, layer normalisation and a linear bottleneck."""

    def block(channels: int) -> nn.Module:
        inner = nn.Sequential(
            nn.Conv2d(channels, channels, 7, padding=3, groups=channels),
            Rearrange(0, 2, 3, 1),
            nn.LayerNorm(channels),
            nn.Linear(channels, 4 * channels),
            nn.GELU(),
            nn.Linear(4 * channels, channels),
            Rearrange(0, 3, 1, 2),
        )
        return Residual(inner)

    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 4)]
    for stage, repeats in enumerate((3, 3, depth, 3)):
        channels = width * 2**stage
        layers.append(Stack(*(block(channels) for _ in range(repeats))))
        if stage < 3:
            layers.append(nn.Conv2d(channels, 2 * channels, 2, 2))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(8 * width))
    return Chain(*layers, *head, nn.Linear(8 * width, num_classes))


class UNet(Recomputing):
    """Convolutions with group normalisation down and up again, with skip connections."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        widths = [width * 2**step for step in range(depth)]
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(Stack(self._block(each), self._block(each)) for each in widths)
        pairs = list(pairwise(widths))
        self.shrink = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairs)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairs)
        self.merge = nn.ModuleList(nn.Conv2d(2 * a, a, 1) for a, _ in pairs)
        self.up = nn.ModuleList(Stack(self._block(a), self._block(a)) for a, _ in pairs)
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    @staticmethod
    def _block(channels: int) -> nn.Module:
        convolution = nn.Conv2d(channels, channels, 3, padding=1)
        return Residual(nn.Sequential(nn.GroupNorm(8, channels), nn.SiLU(), convolution))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Predict an image of the same size."""
        x = self.first(x)
        kept = []
        for level, stack in enumerate(self.down):
            x = stack(x)
            if level < len(self.shrink):
                kept.append(x)
                x = self.shrink[level](x)
        for level in reversed(range(len(self.grow))):
            x = torch.cat((self.grow[level](x), kept.pop()), dim=1)
            x = self.up[level](self.merge[level](x))
        return self.last(x)


def video(width: int = 32, num_classes: int = 100) -> nn.Module:
    """Build three-dimensional convolutions over short clips."""
    layers: list[nn.Module] = []
    channels = 3
    for step in range(4):
        outputs = width * 2**step
        layers += [nn.Conv3d(channels, outputs, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm3d(outputs), nn.ReLU(inplace=True), nn.MaxPool3d(2)]
        channels = outputs
    head = (nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(channels, num_classes))
    return Chain(*layers, *head)


def audio(width: int = 128, depth: int = 10, num_classes: int = 256) -> nn.Module:
    """Build dilated one-dimensional convolutions over waveforms."""

    def block(index: int) -> nn.Module:
        dilation = 2 ** (index % 5)
        convolution = nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation)
        return Residual(nn.Sequential(nn.GroupNorm(8, width), nn.GELU(), convolution))

    stack = Stack(*(block(index) for index in range(depth)))
    return Chain(nn.Conv1d(1, width, 7, 4, 3), stack, Mean(-1), nn.Linear(width, num_classes))


def mixer(width: int = 512, depth: int = 8, num_classes: int = 1000) -> nn.Module:
    """Build linear layers over patches and over channels in turn, for images of 224 pixels."""
    num_patches = 196

    def block() -> nn.Module:
        across = nn.Sequential(nn.LayerNorm(width), Rearrange(0, 2, 1), _wide(num_patches, 256))
        within = nn.Sequential(nn.LayerNorm(width), _wide(width, 4 * width))
        across.append(Rearrange(0, 2, 1))
        return nn.Sequential(Residual(across), Residual(within))

    patches = (nn.Conv2d(3, width, 16, 16), nn.Flatten(2), Rearrange(0, 2, 1))
    blocks = Stack(*(block() for _ in range(depth)))
    return Chain(*patches, blocks, nn.LayerNorm(width), Mean(1), nn.Linear(width, num_classes))


def _wide(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class Autoencoder(Recomputing):
    """A variational autoencoder of convolutions; gives the loss of each image."""

    def __init__(self, width: int = 64, latent: int = 256) -> None:
        super().__init__()
        down: list[nn.Module] = []
        up: list[nn.Module] = [nn.Linear(latent, 64 * width), nn.Unflatten(1, (4 * width, 4, 4))]
        for inputs, outputs in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
            down += [nn.Conv2d(inputs, outputs, 4, 4 if inputs == 3 else 2, 1), nn.SiLU()]
        for inputs, outputs in ((4 * width, 2 * width), (2 * width, width)):
            up += [nn.ConvTranspose2d(inputs, outputs, 4, 2, 1), nn.SiLU()]
        pool = (nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64 * width, 2 * latent))
        self.encoder = nn.Sequential(*down, *pool)
        self.decoder = nn.Sequential(*up, nn.ConvTranspose2d(width, 3, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return reconstruction error plus divergence, one value per image (64 x 64 pixels)."""
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        image = self.decoder(latent).sigmoid()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)
        return F.mse_loss(image, x, reduction="none").sum((1, 2, 3)) + divergence


class Adversaries(Recomputing):
    """A generator and a discriminator that take turns; gives the loss of each image."""

    def __init__(self, width: int = 64, latent: int = 128) -> None:
        super().__init__()
        self.latent = latent
        up: list[nn.Module] = [nn.Linear(latent, 128 * width), nn.Unflatten(1, (8 * width, 4, 4))]
        down: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True)]
        for step in (8, 4, 2):
            up += [nn.ConvTranspose2d(step * width, step // 2 * width, 4, 2, 1)]
            up += [nn.BatchNorm2d(step // 2 * width), nn.ReLU(inplace=True)]
        for step in (1, 2, 4):
            down += [nn.Conv2d(step * width, 2 * step * width, 4, 2, 1)]
            down += [nn.BatchNorm2d(2 * step * width), nn.LeakyReLU(0.2, inplace=True)]
        self.generator = nn.Sequential(*up, nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh())
        self.discriminator = nn.Sequential(*down, nn.Flatten(), nn.Linear(128 * width, 1))

    def forward(self, turn: str, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of ``generator`` or ``discriminator`` (images of 64 x 64 pixels)."""
        noise = torch.randn(len(x), self.latent, device=x.device, dtype=x.dtype)
        if turn == "generator":
            return F.softplus(-self.discriminator(self.generator(noise)))
        with torch.no_grad():
            images = self.generator(noise)
        return F.softplus(-self.discriminator(x)) + F.softplus(self.discriminator(images))


IMAGE_MODELS: dict[str, Callable[..., nn.Module]] = {
    "adversaries": Adversaries,
    "audio": audio,
    "autoencoder": Autoencoder,
    "cnn": cnn,
    "convnext": convnext,
    "mixer": mixer,
    "mlp": mlp,
    "mobilenet": mobilenet,
    "resnet": resnet,
    "unet": UNet,
    "video": video,
}
