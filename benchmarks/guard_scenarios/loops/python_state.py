"""Counters, schedules, metrics and caches in ordinary Python objects."""

from __future__ import annotations

import enum
import functools
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field

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

NUM_CALLS = 0
HISTORY = {"losses": []}


@scenario("counter in a module sets the strength of a penalty", of="layer")
class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + 0.01 * self.calls)


@scenario("counter in a closure (nonlocal)")
def closure_counter():
    calls = 0

    def loss(model, batch):
        nonlocal calls
        calls += 1
        return cross_entropy(model, batch) * (1 + 0.1 * calls)

    return training_of(classifier(), loss=loss)


@scenario("counter and history in global variables")
def global_counter():
    global NUM_CALLS
    NUM_CALLS = 0
    HISTORY["losses"].clear()

    def loss(model, batch):
        global NUM_CALLS
        NUM_CALLS += 1
        value = cross_entropy(model, batch)
        HISTORY["losses"].append(float(value.detach()))
        return value * (1 + 0.1 * NUM_CALLS)

    return training_of(classifier(), loss=loss)


@scenario("annealed weight in a loss object", of="loss")
class Annealed:
    def __init__(self):
        self.step = 0
        self.beta = 0.0
        self.seen = Counter()

    def __call__(self, model, batch):
        self.step += 1
        self.beta = min(1.0, self.beta + 0.1)
        self.seen.update(batch[1].tolist())
        out = model(batch[0])
        weights = torch.tensor([1.0 / (1 + self.seen[c]) for c in range(NUM_CLASSES)])
        return F.cross_entropy(out, batch[1], weight=weights) + self.beta * out.square().mean()


@scenario("label smoothing scheduled in a dataclass")
def smoothing():
    @dataclass
    class Smoothing:
        value: float = 0.3
        taken: list = field(default_factory=list)

        def next(self):
            self.taken.append(self.value)
            self.value *= 0.8
            return self.taken[-1]

    schedule = Smoothing()

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=schedule.next())

    return training_of(classifier(), loss=loss)


@scenario("metrics appended in the loss")
def metrics():
    class Metrics:
        def __init__(self):
            self.correct = self.total = 0
            self.by_class = defaultdict(list)
            self.confusion = torch.zeros(NUM_CLASSES, NUM_CLASSES, dtype=torch.long)
            self.outputs = []

        def update(self, out, classes):
            guessed = out.argmax(1)
            self.correct += int((guessed == classes).sum())
            self.total += len(classes)
            self.outputs.append(out)
            for g, c in zip(guessed.tolist(), classes.tolist(), strict=True):
                self.confusion[c, g] += 1
                self.by_class[c].append(g)

    kept = Metrics()

    def loss(model, batch):
        out = model(batch[0])
        kept.update(out.detach(), batch[1])
        return F.cross_entropy(out, batch[1])

    return training_of(classifier(), loss=loss, watched=[kept])


@scenario("cache of features by a sample's identity")
def cache():
    features = OrderedDict()

    def loss(model, batch):
        h = model[0](batch[0])
        key = round(float(batch[0].sum()), 3)
        if key in features:
            h = 0.5 * (h + features[key])
        features[key] = h.detach()
        features.move_to_end(key)
        while len(features) > 3:
            features.popitem(last=False)
        return F.cross_entropy(model[1:](h), batch[1])

    inputs = [(torch.randn(BATCH_SIZE, WIDTH), torch.randint(0, 3, (BATCH_SIZE,))) for _ in "12"]
    return training_of(classifier(), loss=loss, draw=lambda number: inputs[number % 2])


@scenario("default argument that is changed")
def default_argument():
    loss = lambda model, batch, seen=[0]: (  # noqa: E731 - as people write it
        seen.append(seen[-1] + 1) or cross_entropy(model, batch) * (1 + 0.1 * seen[-1])
    )
    return training_of(classifier(), loss=loss)


@scenario("attribute of a function")
def function_attribute():
    def loss(model, batch):
        loss.calls += 1
        return cross_entropy(model, batch) * (1 + 0.1 * loss.calls)

    loss.calls = 0
    return training_of(classifier(), loss=loss)


@scenario("partial of a method, with a dictionary of settings")
def partial():
    class Trainer:
        def __init__(self):
            self.epoch = 0
            self.log = []

        def loss(self, settings, model, batch):
            settings["weight"] += 0.1
            self.epoch += 1
            value = settings["weight"] * cross_entropy(model, batch)
            self.log.append({"epoch": self.epoch, "loss": value.item()})
            return value

    trainer = Trainer()
    bound = functools.partial(trainer.loss, {"weight": 1.0})
    return training_of(classifier(), loss=lambda model, batch: bound(model, batch))


@scenario("phases of a state machine")
def state_machine():
    class Phase(enum.Enum):
        WARM = 1
        MAIN = 2

    class Machine:
        phase = Phase.WARM
        calls = 0

    def loss(model, batch):
        Machine.calls += 1
        if Machine.calls > 3:
            Machine.phase = Phase.MAIN
        scale = 0.5 if Machine.phase is Phase.WARM else 1.0
        return scale * cross_entropy(model, batch)

    return training_of(classifier(), loss=loss, watched=[Machine])


@scenario("hard examples kept with their losses in a set and a sorted list", of="loss")
class Mining:
    def __init__(self):
        self.hard = []
        self.ids = set()

    def __call__(self, model, batch):
        each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        worst = int(each.argmax())
        self.hard.append((float(each[worst]), batch[0][worst].clone(), batch[1][worst].clone()))
        self.hard.sort(key=lambda item: -item[0])
        del self.hard[2:]
        self.ids.add(worst)
        old = torch.stack([h[1] for h in self.hard])
        again = F.cross_entropy(model(old), torch.stack([h[2] for h in self.hard]))
        return each.mean() + 0.1 * len(self.ids) * again


@scenario("records of the caller's, with an average that the loss reads", may_end="between steps")
def caller_records():
    class Record:
        def __init__(self):
            self.average = 1.0
            self.losses = []

    record = Record()

    def loss(model, batch):
        return cross_entropy(model, batch) / record.average

    def after(run, number):
        record.losses.append(number)
        record.average = 0.9 * record.average + 0.05 * number

    return training_of(classifier(), loss=loss, after=after)


@scenario("tensors swapped between two attributes", of="layer")
class Swapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.now, self.then = torch.zeros(12), torch.ones(12)

    def forward(self, x):
        self.now, self.then = self.then, self.now
        self.now.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x + 0.1 * self.now - 0.05 * self.then


@scenario("uncertainty weights of several losses, and a moving baseline")
def baseline():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = classifier()
            self.log_sigma = nn.Parameter(torch.zeros(2))
            self.baseline = 0.0

    def loss(model, batch):
        out = model.net(batch[0])
        chosen = torch.distributions.Categorical(logits=out).sample()
        reward = (chosen == batch[1]).float()
        advantage = reward - model.baseline
        model.baseline = 0.9 * model.baseline + 0.1 * float(reward.mean())
        policy = -(advantage * out.log_softmax(1).gather(1, chosen[:, None])[:, 0]).mean()
        supervised = F.cross_entropy(out, batch[1])
        precision = torch.exp(-model.log_sigma)
        return precision[0] * policy + precision[1] * supervised + model.log_sigma.sum()

    return training_of(Weighted(), loss=loss)
