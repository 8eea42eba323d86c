"""Steps that draw at random: from torch, from generators of their own, from numpy and random."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from exactness.case import Theme
from exactness.parts import Modules, classifier, cross_entropy, encoder, labelled, make_job, vectors

theme = Theme("blind")


class Masked(nn.Module):
    """A block whose activations are multiplied by a mask."""

    def __init__(self, mask):
        super().__init__()
        self.linear, self.mask = nn.Linear(12, 12), mask

    def forward(self, x):
        return x + torch.tanh(self.linear(x) * self.mask(x))


def masked(*masks):
    """Stack a block for each mask, and a head."""
    return nn.Sequential(nn.Sequential(*(Masked(mask) for mask in masks)), nn.Linear(12, 4))


@theme.model(labelled, cross_entropy, draws="per-sample")
def dropout_layers():
    """``nn.Dropout``."""
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))


@theme.model(labelled, cross_entropy, draws="per-sample", blocks="0")
def dropout_by_function():
    """``F.dropout`` in forward."""

    def mask(x):
        return F.dropout(torch.ones_like(x), 0.5, training=True)

    return masked(mask, mask)


@theme.model(labelled, cross_entropy, draws="per-sample", blocks="0", recompute_unsafe=True)
def dropout_from_an_own_generator():
    """Masks from a ``torch.Generator`` of one's own, which checkpointing does not put back."""

    def mask():
        generator = torch.Generator().manual_seed(3)

        def draw(x):
            return (torch.rand(x.shape, generator=generator) > 0.5).to(x.dtype) * 2

        return draw

    return masked(mask(), mask())


@theme.model(labelled, cross_entropy, draws="per-sample", blocks="0", recompute_unsafe=True)
def masks_from_numpy():
    """Masks from numpy's global generator, within a block."""

    def mask(x):
        return torch.from_numpy(np.random.rand(*x.shape) > 0.5).to(x.dtype) * 2

    return masked(mask, torch.ones_like)


@theme.model(labelled, cross_entropy, draws="per-sample", blocks="0", recompute_unsafe=True)
def masks_from_an_own_numpy_generator():
    """Masks from a ``numpy.random.Generator`` that the block holds."""

    class Drawn:
        def __init__(self):
            self.rng = np.random.default_rng(0)

        def __call__(self, x):
            return torch.as_tensor(self.rng.binomial(1, 0.5, tuple(x.shape)) * 2.0)

    return masked(Drawn(), Drawn())


@theme.model(labelled, cross_entropy, draws="per-sample", blocks="0", recompute_unsafe=True)
def masks_from_random():
    """One factor per sample from Python's ``random``, within a block."""

    def mask(x):
        return torch.tensor([[random.uniform(0.5, 1.5)] for _ in range(len(x))])

    return masked(mask, torch.ones_like)


@theme.model(labelled, cross_entropy, draws="shared", blocks="0", recompute_unsafe=True)
def layer_drop_by_random():
    """LayerDrop: ``random`` decides whether the whole block is left out, for all samples."""

    class Skipped(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(12, 12)

        def forward(self, x):
            if self.training and random.random() < 0.5:
                return x * 1.0
            return x + torch.tanh(self.linear(x))

    return nn.Sequential(nn.Sequential(*(Skipped() for _ in range(6))), nn.Linear(12, 4))


@theme.model(labelled, cross_entropy, draws="shared", blocks="0", recompute_unsafe=True)
def numpy_draws_in_forward():
    """A factor from numpy for the whole batch, drawn in forward."""

    def mask(x):
        return float(np.random.uniform(0.5, 1.5))

    return masked(mask, mask)


@theme.model(labelled, cross_entropy, draws="per-sample", blocks="0")
def drop_path_per_sample():
    """Stochastic depth: a branch is dropped for some samples."""

    def mask(x):
        return torch.empty(x.shape[0], 1).bernoulli_(0.8) / 0.8

    return masked(mask, mask)


@theme.model(labelled, cross_entropy, draws="shared", blocks="0")
def drop_path_for_the_whole_batch():
    """Stochastic depth in its batch mode: one draw for all samples."""

    def mask(x):
        return torch.rand(1) + 0.5

    return masked(mask, mask)


@theme.loss(classifier, labelled, draws="shared")
def variational_dropout_over_features(model, x, y):
    """One mask of the features for all samples."""
    mask = torch.bernoulli(torch.full((1, x.shape[1]), 0.8)) / 0.8
    return F.cross_entropy(model(x * mask), y)


@theme.case(draws="shared")
def noise_on_weights():
    """A Bayesian layer: its weights are drawn anew in each forward."""

    class Bayesian(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = nn.Parameter(torch.randn(4, 12) * 0.3)
            self.rho = nn.Parameter(torch.full((4, 12), -2.0))

        def forward(self, x):
            weight = self.mean + F.softplus(self.rho) * torch.randn_like(self.mean)
            return F.linear(x, weight)

    return make_job(Bayesian, labelled, cross_entropy)


@theme.loss(lambda: encoder(12), vectors, draws="per-sample")
def noise_on_inputs(model, x):
    """Denoising autoencoder."""
    return F.mse_loss(model(x + 0.3 * torch.randn_like(x)), x)


@theme.loss(classifier, labelled, adds="no", draws="shared")
def mixup_with_a_permutation(model, x, y):
    """Mixup within the loss: samples are mixed with a permutation of the batch."""
    share = float(np.random.beta(0.4, 0.4))
    order = torch.randperm(len(x))
    logits = model(share * x + (1 - share) * x[order])
    return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])


@theme.loss(classifier, lambda size: (*labelled(size), torch.rand(size, 1) * 0.5), adds="no")
def mixup_with_the_reverse(model, x, y, share):
    """Mixup with the batch in reverse order and a share per sample from the loader."""
    logits = model((1 - share) * x + share * x.flip(0))
    losses = F.cross_entropy(logits, y, reduction="none")
    others = F.cross_entropy(logits, y.flip(0), reduction="none")
    return ((1 - share[:, 0]) * losses + share[:, 0] * others).mean()


@theme.case(draws="per-sample")
def gumbel_softmax():
    """Straight-through Gumbel-softmax: one category is drawn for each sample."""

    class Categorical(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.decode = encoder(6), nn.Linear(6, 12)

        def forward(self, x):
            return self.decode(F.gumbel_softmax(self.encode(x), tau=0.7, hard=True))

    return make_job(Categorical, vectors, lambda m, x: F.mse_loss(m(x), x))


@theme.loss(classifier, vectors, draws="per-sample")
def policy_gradient_with_drawn_actions(model, x):
    """REINFORCE: actions are drawn in the loss."""
    policy = torch.distributions.Categorical(logits=model(x))
    action = policy.sample()
    reward = (action == x[:, :4].argmax(1)).to(x.dtype)
    return -(policy.log_prob(action) * reward).mean() - 0.01 * policy.entropy().mean()


def items():
    return Modules(encode=encoder(), items=nn.Embedding(40, 8))


@theme.loss(items, labelled, draws="shared")
def negatives_drawn_for_the_batch(model, x, y):
    """Sampled softmax: the same drawn negatives for all samples."""
    z = model.encode(x)
    negatives = torch.randint(0, 40, (6,))
    positive = (z * model.items(y)).sum(1, keepdim=True)
    logits = torch.cat([positive, z @ model.items(negatives).T], dim=1)
    return F.cross_entropy(logits, torch.zeros(len(z), dtype=torch.long))


@theme.loss(items, labelled, draws="per-sample")
def negatives_drawn_for_each_sample(model, x, y):
    """Sampled softmax with negatives of each sample's own."""
    z = model.encode(x)
    negatives = model.items(torch.randint(0, 40, (len(x), 6)))
    positive = (z * model.items(y)).sum(1, keepdim=True)
    logits = torch.cat([positive, torch.einsum("bd,bnd->bn", z, negatives)], dim=1)
    return F.cross_entropy(logits, torch.zeros(len(z), dtype=torch.long))
