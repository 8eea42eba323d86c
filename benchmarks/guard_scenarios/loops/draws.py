"""Random draws from generators of every kind."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from guard_scenarios.training import (
    BATCH_SIZE,
    NUM_CLASSES,
    WIDTH,
    classifier,
    cross_entropy,
    scenario,
    training_of,
)

GLOBAL_NUMPY = np.random.default_rng(5)
GLOBAL_RANDOM = random.Random(5)


@scenario("numpy generator in the loss's closure")
def numpy_in_closure():
    rng = np.random.default_rng(0)

    def loss(model, batch):
        noise = torch.from_numpy(rng.normal(0, 0.1, batch[0].shape)).float()
        return cross_entropy(model, (batch[0] + noise, batch[1]))

    return training_of(classifier(), loss=loss)


@scenario("numpy generator as an attribute of a module", of="layer")
class NumpyNoise(nn.Module):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)

    def forward(self, x):
        return x + torch.from_numpy(self.rng.standard_normal(x.shape)).float()


@scenario("numpy generator in a global variable")
def numpy_global():
    global GLOBAL_NUMPY
    GLOBAL_NUMPY = np.random.default_rng(5)

    def loss(model, batch):
        keep = torch.from_numpy(GLOBAL_NUMPY.random(batch[0].shape) > 0.1)
        return cross_entropy(model, (batch[0] * keep, batch[1]))

    return training_of(classifier(), loss=loss)


@scenario("random.Random in a global variable and as an attribute")
def python_random():
    global GLOBAL_RANDOM
    GLOBAL_RANDOM = random.Random(5)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.random = random.Random(1)
            self.layer = nn.Linear(12, 12)

        def forward(self, x):
            if self.random.random() < 0.5 or GLOBAL_RANDOM.gauss(0, 1) > 1:
                return x
            return self.layer(x)

    return training_of(classifier(Layer()))


@scenario("torch.Generator in the model", of="layer")
class OwnNoise(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(4)

    def forward(self, x):
        return x + 0.1 * torch.randn(x.shape, generator=self.generator)


@scenario("torch.Generator in the loss's closure")
def generator_in_loss():
    generator = torch.Generator().manual_seed(4)

    def loss(model, batch):
        mask = torch.rand(batch[0].shape, generator=generator) > 0.2
        return cross_entropy(model, (batch[0] * mask, batch[1]))

    return training_of(classifier(), loss=loss)


@scenario("torch.Generator shared by the loss and the loader")
def generator_in_loader():
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(64, WIDTH)
    classes = torch.randint(0, NUM_CLASSES, (64,))

    def draw(number):
        chosen = torch.randperm(64, generator=generator)[:BATCH_SIZE]
        return inputs[chosen], classes[chosen]

    def loss(model, batch):
        noise = torch.randn(batch[0].shape, generator=generator)
        return cross_entropy(model, (batch[0] + 0.1 * noise, batch[1]))

    return training_of(classifier(), loss=loss, draw=draw, watched=[generator])


@scenario("stochastic depth drawn from random", of="layer")
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.num_kept = 0

    def forward(self, x):
        for block in self.blocks:
            if random.random() < 0.6:
                self.num_kept += 1
                x = x + F.relu(block(x))
        return x


@scenario("mixup drawn from numpy's global generator")
def mixup():
    def loss(model, batch):
        inputs, classes = batch
        share = float(np.random.beta(0.4, 0.4))
        order = torch.from_numpy(np.random.permutation(len(inputs)))
        out = model(share * inputs + (1 - share) * inputs[order])
        first, second = F.cross_entropy(out, classes), F.cross_entropy(out, classes[order])
        return share * first + (1 - share) * second

    return training_of(classifier(), loss=loss)


@scenario("legacy RandomState in a dictionary of settings")
def random_state():
    settings = {"rng": np.random.RandomState(3), "strength": 0.1}

    def loss(model, batch):
        noise = settings["rng"].randn(*batch[0].shape) * settings["strength"]
        settings["strength"] *= 0.95
        return cross_entropy(model, (batch[0] + torch.from_numpy(noise).float(), batch[1]))

    return training_of(classifier(), loss=loss)


@scenario("Gumbel noise and dropout, and draws by the caller between steps")
def gumbel():
    def loss(model, batch):
        soft = F.gumbel_softmax(model(batch[0]), tau=0.7)
        return F.nll_loss((soft + 1e-6).log(), batch[1])

    drawn = []

    def after(run, number):
        drawn.append((random.random(), float(torch.rand(())), float(np.random.rand())))

    return training_of(classifier(), loss=loss, after=after, watched=[drawn])
