"""Loops that were written when the guard was done, and were not looked at before its first try."""

from __future__ import annotations

import array
import bisect
import contextvars
import copy
import functools
import io
import weakref
from dataclasses import replace

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

NUM_SEEN = contextvars.ContextVar("num_seen", default=0)


@scenario("held out: discriminator updated by its own optimizer inside the loss")
def adversary():
    critic = nn.Sequential(nn.Linear(WIDTH, 8), nn.LeakyReLU(), nn.Linear(8, 1))
    own = torch.optim.Adam(critic.parameters(), lr=0.02, betas=(0.5, 0.9))
    model = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH))

    def loss(model, batch):
        fake = model(torch.randn_like(batch[0]))
        own.zero_grad()
        (critic(fake.detach()).mean() - critic(batch[0]).mean()).backward()
        own.step()
        for p in critic.parameters():
            p.data.clamp_(-0.1, 0.1)
        return -critic(fake).mean()

    return training_of(model, loss=loss)


@scenario("held out: samples drawn by priorities that the loss changes in an array")
def priorities():
    inputs, classes = torch.randn(40, WIDTH), torch.randint(0, NUM_CLASSES, (40,))
    weights = np.ones(40)

    def draw(number):
        chosen = np.random.choice(40, BATCH_SIZE, p=weights / weights.sum())
        return inputs[chosen], classes[chosen], torch.from_numpy(chosen)

    def loss(model, batch):
        each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        weights[batch[2].numpy()] = 0.1 + each.detach().numpy()
        return each.mean()

    training = training_of(classifier(), loss=loss, draw=draw, watched=[weights])
    training.job = replace(
        training.job,
        batch=lambda size: (inputs[:size].clone(), classes[:size].clone(), torch.arange(size)),
    )
    return training


@scenario("held out: masks remembered by lru_cache", must_say="mask")
def remembered():
    @functools.cache
    def mask(number):
        return torch.rand(WIDTH) > 0.2

    calls = [0]

    def loss(model, batch):
        calls[0] += 1
        return cross_entropy(model, (batch[0] * mask(calls[0] // 2), batch[1]))

    return training_of(classifier(), loss=loss, watched=[calls])


@scenario("held out: counter in a context variable", must_say="NUM_SEEN")
def context_variable():
    NUM_SEEN.set(0)

    def loss(model, batch):
        NUM_SEEN.set(NUM_SEEN.get() + len(batch[1]))
        return cross_entropy(model, batch) / (1 + 0.01 * NUM_SEEN.get())

    return training_of(classifier(), loss=loss)


@scenario("held out: running statistics by module in a weak-key dictionary")
def by_module():
    model = classifier(nn.Linear(12, 12))
    scales = weakref.WeakKeyDictionary()

    def hook(module, args, output):
        scales[module] = 0.9 * scales.get(module, 1.0) + 0.1 * float(output.detach().std())
        return output / scales[module]

    for module in (model[0], model[1]):
        module.register_forward_hook(hook)
    return training_of(model, watched=[scales])


@scenario("held out: buffer and gain that are made in the first forward")
def made_late():
    class Late(nn.Module):
        def forward(self, x):
            if not hasattr(self, "centre"):
                self.register_buffer("centre", x.detach().mean(0), persistent=False)
                self.gain = 1.0
            self.centre += 0.1 * (x.detach().mean(0) - self.centre)
            self.gain *= 0.99
            return (x - self.centre) * self.gain

    model = classifier(Late())

    def started(run):
        if hasattr(model[1], "centre"):
            del model[1].centre, model[1].gain

    return training_of(model, started=started)


@scenario("held out: quantile of losses kept sorted in an array", of="loss")
class Quantile:
    def __init__(self):
        self.values = array.array("d", [1.0])

    def __call__(self, model, batch):
        each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        for value in each.tolist():
            bisect.insort(self.values, value)
        limit = self.values[len(self.values) // 2]
        return torch.where(each > limit, each, 0.5 * each).mean()


@scenario("held out: text of the losses in a StringIO", must_say="text")
def text():
    text = io.StringIO()

    def loss(model, batch):
        value = cross_entropy(model, batch)
        print(f"{float(value):.4f}", file=text)
        return value

    return training_of(classifier(), loss=loss, watched=[text])


@scenario(
    "held out: averaged weights swapped in by the caller for a look, and out again",
    may_end="between steps",
)
def swapped_in():
    model = classifier(nn.BatchNorm1d(12))
    average = copy.deepcopy(model.state_dict())
    looks = []

    def after(run, number):
        own = copy.deepcopy(model.state_dict())
        for name, value in average.items():
            if value.is_floating_point():
                value.lerp_(own[name], 0.3)
        model.load_state_dict(average)
        model.eval()
        with torch.no_grad():
            looks.append(float(model(torch.ones(2, WIDTH)).sum()))
        model.train()
        model.load_state_dict(own)

    return training_of(model, after=after, watched=[average, looks])


@scenario(
    "held out: Adagrad, and noise from numpy generators that a sequence of seeds spawns",
    must_say="seeds",
)
def spawned():
    seeds = np.random.SeedSequence(7)
    flags = bytearray(4)

    def loss(model, batch):
        rng = np.random.default_rng(seeds.spawn(1)[0])
        flags[0] = (flags[0] + 1) % 256
        noise = torch.from_numpy(rng.normal(0, 0.1, batch[0].shape)).float()
        return cross_entropy(model, (batch[0] + noise, batch[1])) * (1 + 0.01 * flags[0])

    return training_of(
        classifier(), loss=loss, optimizer=lambda ps: torch.optim.Adagrad(ps, lr=0.05)
    )
