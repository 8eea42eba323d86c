"""Layers that keep something between forwards, or that look at the whole batch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from exactness.case import Theme
from exactness.parts import cross_entropy, images, labelled, two_blocks

theme = Theme("blind")


class WithNorm(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.linear, self.norm = nn.Linear(12, 12), norm

    def forward(self, x):
        return x + torch.tanh(self.norm(self.linear(x)))


@theme.model(
    labelled, cross_entropy, adds="no", leaves="different", recompute_unsafe=True, blocks="0"
)
def batch_norm():
    """BatchNorm in training."""
    return two_blocks(lambda: WithNorm(nn.BatchNorm1d(12)))


@theme.model(labelled, cross_entropy, blocks="0")
def batch_norm_frozen():
    """BatchNorm in evaluation, as fine-tuning does."""
    return two_blocks(lambda: WithNorm(nn.BatchNorm1d(12))).eval()


class OwnBatchStatistics(nn.Module):
    """What a synchronised BatchNorm computes by itself: sums of values and of squares."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x):
        count = x.shape[0]
        mean = x.sum(0) / count
        var = (x * x).sum(0) / count - mean * mean
        with torch.no_grad():
            self.running_mean += 0.1 * (mean - self.running_mean)
            self.running_var += 0.1 * (var - self.running_var)
        return (x - mean) * torch.rsqrt(var + 1e-5) * self.weight + self.bias


@theme.model(
    labelled, cross_entropy, adds="no", leaves="different", recompute_unsafe=True, blocks="0"
)
def sync_batch_norm_by_hand():
    """Batch statistics from sums, with running buffers."""
    return two_blocks(lambda: WithNorm(OwnBatchStatistics(12)))


class RunningNorm(nn.Module):
    """Normalises by running statistics, which each forward moves before they are used."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))
        self.register_buffer("count", torch.tensor(1e-4))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                n, total = x.shape[0], self.count + x.shape[0]
                gap = x.mean(0) - self.mean
                self.mean.add_(gap * n / total)
                self.var.mul_(self.count / total).add_(x.var(0, unbiased=False) * n / total)
                self.count.copy_(total)
        return (x - self.mean) / (self.var + 1e-8).sqrt()


@theme.model(
    labelled, cross_entropy, adds="no", leaves="different", recompute_unsafe=True, blocks="0"
)
def running_normalisation():
    """Observations are normalised by running statistics in own buffers."""
    return two_blocks(lambda: WithNorm(RunningNorm(12)))


@theme.model(labelled, cross_entropy, leaves="different", recompute_unsafe=True, blocks="0")
def activation_statistics_noted():
    """A block keeps a running mean of its activations, which it does not use in training."""

    class Noted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(12, 12)
            self.register_buffer("seen", torch.zeros(12))

        def forward(self, x):
            y = torch.tanh(self.linear(x))
            self.seen.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
            return y

    return two_blocks(Noted)


@theme.model(labelled, cross_entropy, leaves="scratch", blocks="0")
def activations_kept_for_a_plot():
    """A block keeps its last activations as an attribute."""

    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(12, 12)
            self.last = None

        def forward(self, x):
            y = torch.tanh(self.linear(x))
            self.last = y.detach()
            return y

    return two_blocks(Kept)


class Convolutional(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(6, 6, 3, padding=1), norm

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


def conv_net(norm):
    """Stack a stem, two blocks and a head."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.Sequential(Convolutional(norm()), Convolutional(norm())),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)),
    )


def labelled_images(size):
    return images(size, extent=6), labelled(size)[1]


@theme.model(
    labelled_images, cross_entropy, 8, leaves="different", recompute_unsafe=True, blocks="1"
)
def instance_norm_with_running_statistics():
    """InstanceNorm that tracks running statistics, which training does not use."""
    return conv_net(lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True))


@theme.model(labelled_images, cross_entropy, 8, blocks="1")
def instance_norm():
    """InstanceNorm without running statistics."""
    return conv_net(lambda: nn.InstanceNorm2d(6))


@theme.model(labelled_images, cross_entropy, 8, blocks="1")
def group_norm():
    """A conv net with GroupNorm."""
    return conv_net(lambda: nn.GroupNorm(2, 6))


@theme.model(labelled, cross_entropy, blocks="0")
def layer_norm():
    """LayerNorm."""
    return two_blocks(lambda: WithNorm(nn.LayerNorm(12)))


@theme.model(labelled, cross_entropy, blocks="0")
def rms_norm():
    """RMSNorm."""
    return two_blocks(lambda: WithNorm(nn.RMSNorm(12)))


class Spectral(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.linear = wrap(nn.Linear(12, 12))

    def forward(self, x):
        return F.leaky_relu(self.linear(x), 0.2)


@theme.model(
    labelled, cross_entropy, adds="no", leaves="different", recompute_unsafe=True, blocks="0"
)
def spectral_norm_by_hook():
    """``torch.nn.utils.spectral_norm``: each forward does one power iteration."""
    return two_blocks(lambda: Spectral(nn.utils.spectral_norm))


@theme.model(
    labelled, cross_entropy, adds="no", leaves="different", recompute_unsafe=True, blocks="0"
)
def spectral_norm_by_parametrization():
    """``torch.nn.utils.parametrizations.spectral_norm``."""
    return two_blocks(lambda: Spectral(nn.utils.parametrizations.spectral_norm))


@theme.model(labelled, cross_entropy, blocks="0")
def weight_norm_by_parametrization():
    """``torch.nn.utils.parametrizations.weight_norm``, which keeps nothing."""
    return two_blocks(lambda: Spectral(nn.utils.parametrizations.weight_norm))
