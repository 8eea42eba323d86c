"""Layers and losses that keep counts, codebooks, ranges and hidden states between forwards."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from exactness.case import Theme
from exactness.parts import (
    classifier,
    cross_entropy,
    encoder,
    labelled,
    make_job,
    two_blocks,
    vectors,
)

theme = Theme("blind")


@theme.model(
    labelled, cross_entropy, adds="no", leaves="different", recompute_unsafe=True, blocks="0"
)
def counts_its_calls_and_uses_the_count():
    """A temperature that falls with each call of the block."""

    class Annealed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = nn.Linear(12, 12), 0

        def forward(self, x):
            self.calls += 1
            return torch.tanh(self.linear(x) / (1 + 1 / self.calls))

    return two_blocks(Annealed)


@theme.model(labelled, cross_entropy, leaves="different", recompute_unsafe=True, blocks="0")
def counts_its_calls_only():
    """A block that counts its calls and does nothing with the count."""

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(12, 12)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.calls += 1
            return torch.tanh(self.linear(x))

    return two_blocks(Counted)


@theme.model(
    labelled, cross_entropy, adds="no", leaves="different", recompute_unsafe=True, blocks="0"
)
def warms_up_with_each_call():
    """A buffer that grows with each call scales the block's output."""

    class WarmUp(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(12, 12)
            self.register_buffer("gain", torch.tensor(0.1))

        def forward(self, x):
            self.gain.add_(0.1).clamp_(max=1.0)
            return x + self.gain.clone() * torch.tanh(self.linear(x))

    return two_blocks(WarmUp)


class Quantiser(nn.Module):
    def __init__(self, decay):
        super().__init__()
        self.decay = decay
        self.register_buffer("codebook", torch.randn(6, 12))
        self.register_buffer("cluster_size", torch.ones(6))
        self.register_buffer("sums", self.codebook.clone())

    def forward(self, z):
        index = torch.cdist(z, self.codebook).argmin(1)
        quantised = F.embedding(index, self.codebook)
        if self.decay and self.training:
            hits = F.one_hot(index, 6).to(z.dtype)
            with torch.no_grad():
                self.cluster_size.lerp_(hits.sum(0), 1 - self.decay)
                self.sums.lerp_(hits.t() @ z, 1 - self.decay)
                self.codebook.copy_(self.sums / (self.cluster_size + 1e-5).unsqueeze(1))
        self.commitment = F.mse_loss(z, quantised.detach())
        return z + (quantised - z).detach()


class VqAutoencoder(nn.Module):
    def __init__(self, decay=0.0):
        super().__init__()
        self.encode = nn.Linear(12, 12)
        self.quantise = Quantiser(decay)
        self.decode = nn.Linear(12, 12)

    def forward(self, x):
        return self.decode(self.quantise(self.encode(x)))


def vq_loss(model, x):
    return F.mse_loss(model(x), x) + 0.25 * model.quantise.commitment


@theme.case(adds="no", leaves="different", recompute_unsafe=True)
def vector_quantisation_with_ema():
    """A VQ-VAE whose codebook follows its inputs, in forward."""
    return make_job(lambda: VqAutoencoder(0.8), vectors, vq_loss)


@theme.case(leaves="scratch")
def vector_quantisation_fixed():
    """A VQ-VAE with a fixed codebook, whose commitment loss is kept as an attribute."""
    return make_job(VqAutoencoder, vectors, vq_loss)


@theme.case(adds="no")
def straight_through_of_a_batch_statistic():
    """Forward uses the batch's scale; backward sees each sample's own value."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.head = nn.Linear(12, 12), nn.Linear(12, 4)

        def forward(self, x):
            z = self.linear(x)
            scaled = z / z.abs().amax()
            return self.head(torch.tanh(z + (scaled - z).detach()))

    return make_job(Scaled, labelled, cross_entropy)


@theme.model(
    labelled, cross_entropy, adds="no", leaves="different", recompute_unsafe=True, blocks="0"
)
def fake_quantisation_with_an_observer():
    """Quantisation-aware training: a moving range of activations sets the scale."""

    class Observed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(12, 12)
            self.register_buffer("largest", torch.tensor(1.0))

        def forward(self, x):
            y = torch.tanh(self.linear(x))
            with torch.no_grad():
                self.largest.lerp_(y.abs().max(), 0.1)
            scale = self.largest.clone() / 15
            quantised = torch.round(y / scale).clamp(-16, 15) * scale
            return y + (quantised - y).detach()

    return two_blocks(Observed)


@theme.case(adds="no", leaves="different", recompute_unsafe=True)
def rnn_that_keeps_its_state():
    """Truncated backpropagation: the hidden state stays as an attribute between steps."""

    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(12, 8, batch_first=True), nn.Linear(8, 4)
            self.hidden = None

        def forward(self, x):
            out, hidden = self.rnn(x, self.hidden)
            self.hidden = hidden.detach()
            return self.head(out[:, -1])

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Stateful()

        def forward(self, x):
            return self.body(x)

    def batch(size):
        return torch.randn(size, 5, 12), labelled(size)[1]

    return make_job(Outer, batch, cross_entropy, 8)


@theme.model(labelled, cross_entropy, adds="no", effects=True)
def initialised_by_the_first_batch():
    """ActNorm: the first batch that it sees sets scale and bias."""

    class ActNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(8))
            self.log_scale = nn.Parameter(torch.zeros(8))
            self.register_buffer("is_ready", torch.tensor(False))

        def forward(self, x):
            if not self.is_ready:
                with torch.no_grad():
                    self.bias.copy_(-x.mean(0))
                    self.log_scale.copy_(-x.std(0).log())
                    self.is_ready.fill_(True)
            return (x + self.bias) * self.log_scale.exp()

    return nn.Sequential(encoder(), ActNorm(), nn.Linear(8, 4))


@theme.case(leaves="different")
def loss_scale_noted_in_a_closure():
    """The loss function keeps a running mean of itself, for a log."""
    noted = {"mean": 0.0}

    def loss(model, batch):
        value = cross_entropy(model, batch)
        noted["mean"] = 0.9 * noted["mean"] + 0.1 * value.item()
        return value

    return make_job(classifier, labelled, loss)


@theme.case(adds="no", leaves="different")
def loss_normalised_by_its_running_mean():
    """The loss is divided by a running mean of itself."""
    noted = {"mean": torch.ones(())}

    def loss(model, batch):
        value = cross_entropy(model, batch)
        noted["mean"] = 0.9 * noted["mean"] + 0.1 * value.detach()
        return value / noted["mean"]

    return make_job(classifier, labelled, loss)
