"""Batches that are changed, reused, ragged, or carry Python objects."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from guard_scenarios.training import (
    BATCH_SIZE,
    NUM_CLASSES,
    NUM_STEPS,
    WIDTH,
    classifier,
    cross_entropy,
    labelled,
    one_batch,
    scenario,
    training_of,
)


class Progress:
    """A counter that travels with the batch."""

    def __init__(self):
        self.seen = 0


@scenario("list in the batch that the loss changes")
def list_in_batch():
    batches = [{"x": x, "y": y, "log": [0.5, 0]} for x, y in labelled()]

    def loss(model, batch):
        value = F.cross_entropy(model(batch["x"]), batch["y"])
        batch["log"][1] += 1
        batch["log"][0] += float(value.detach())
        return value * (1 + 0.1 * batch["log"][0])

    training = training_of(classifier(), loss=loss, batches=batches, watched=[batches])
    return _with_batches(training, lambda size: _as_dict(size, [0.5, 0]))


@scenario("dictionary of the batch whose entries the loss exchanges")
def dictionary_batch():
    batches = [{"x": x, "y": y, "log": {"calls": 0}} for x, y in labelled()]

    def loss(model, batch):
        batch["log"]["calls"] += 1
        batch["x"] = batch["x"] * 0.9
        return F.cross_entropy(model(batch["x"]), batch["y"]) / batch["log"]["calls"]

    training = training_of(classifier(), loss=loss, batches=batches, watched=[batches])
    return _with_batches(training, lambda size: _as_dict(size, {"calls": 0}))


@scenario("counter object in the batch")
def counter_in_batch():
    progress = Progress()
    batches = [{"x": x, "y": y, "progress": progress} for x, y in labelled()]

    def loss(model, batch):
        batch["progress"].seen += len(batch["y"])
        return F.cross_entropy(model(batch["x"]), batch["y"]) * (1 + 0.01 * batch["progress"].seen)

    training = training_of(classifier(), loss=loss, batches=batches, watched=[progress])
    return _with_batches(training, lambda size: _as_dict(size, Progress(), "progress"))


@scenario("batch augmented in place in the loss")
def augmented():
    batches = labelled()

    def loss(model, batch):
        batch[0].add_(0.1 * torch.randn_like(batch[0]))
        return cross_entropy(model, batch)

    return training_of(classifier(), loss=loss, batches=batches, watched=[batches])


@scenario("batch normalised in place through numpy in the loss")
def normalised():
    batches = labelled()

    def loss(model, batch):
        values = batch[0].numpy()
        values -= values.mean(0)
        values /= values.std(0) + 0.1
        return cross_entropy(model, batch)

    return training_of(classifier(), loss=loss, batches=batches, watched=[batches])


@scenario("one element of a large batch changed through .data in the loss")
def one_element():
    batches = [(torch.randn(BATCH_SIZE, 500), y) for _, y in labelled()]
    model = torch.nn.Sequential(torch.nn.Linear(500, 8), torch.nn.Linear(8, NUM_CLASSES))

    def loss(model, batch):
        batch[0].data[3, 123] += 1.0
        return cross_entropy(model, batch)

    training = training_of(model, loss=loss, batches=batches, watched=[batches])
    return _with_batches(
        training, lambda size: (torch.randn(size, 500), torch.randint(0, NUM_CLASSES, (size,)))
    )


@scenario("loader that reuses one buffer")
def reused():
    inputs, classes = one_batch(BATCH_SIZE)
    source = labelled()

    def draw(number):
        inputs.copy_(source[number][0])
        classes.copy_(source[number][1])
        return inputs, classes

    return training_of(classifier(), draw=draw)


@scenario("loader that reuses one buffer, which the loss changes in place")
def reused_and_changed():
    inputs, classes = one_batch(BATCH_SIZE)
    source = labelled()

    def draw(number):
        inputs.data.copy_(source[number][0])
        classes.copy_(source[number][1])
        return inputs, classes

    def loss(model, batch):
        batch[0].mul_(1.1)
        return cross_entropy(model, batch)

    return training_of(classifier(), draw=draw, loss=loss, watched=[inputs])


@scenario("ragged last batch")
def ragged():
    batches = [*labelled(NUM_STEPS - 1), *labelled(1, 3)]
    return training_of(classifier(torch.nn.LayerNorm(12)), batches=batches)


@scenario("replay buffer that the loss fills and samples from")
def replay():
    class Replay:
        def __init__(self):
            self.inputs = torch.zeros(32, WIDTH)
            self.classes = torch.zeros(32, dtype=torch.long)
            self.filled = self.at = 0

        def push(self, inputs, classes):
            for x, y in zip(inputs, classes, strict=True):
                self.inputs[self.at], self.classes[self.at] = x, y
                self.at = (self.at + 1) % 32
                self.filled = min(32, self.filled + 1)

    kept = Replay()

    def loss(model, batch):
        value = cross_entropy(model, batch)
        kept.push(*batch)
        chosen = torch.randint(0, kept.filled, (4,))
        return value + cross_entropy(model, (kept.inputs[chosen], kept.classes[chosen]))

    return training_of(classifier(), loss=loss)


@scenario("same batch object in every step, moved towards its gradient by the loss")
def adversarial():
    batch = one_batch(BATCH_SIZE)

    def loss(model, batch):
        moved = batch[0].detach().clone().requires_grad_(True)
        (grad,) = torch.autograd.grad(cross_entropy(model, (moved, batch[1])), moved)
        batch[0].add_(0.05 * grad.sign())
        return cross_entropy(model, batch)

    return training_of(classifier(), loss=loss, draw=lambda number: batch, watched=[batch])


def _as_dict(size, extra, name="log"):
    inputs, classes = one_batch(size)
    return {"x": inputs, "y": classes, name: extra}


def _with_batches(training, batch):
    training.job = replace(training.job, batch=batch)
    return training
