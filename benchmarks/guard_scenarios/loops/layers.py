"""Layers that keep something from step to step."""

from __future__ import annotations

import warnings
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from guard_scenarios.training import (
    NUM_CLASSES,
    WIDTH,
    classifier,
    cross_entropy,
    scenario,
    training_of,
)


@scenario("batch normalisation")
def batch_norm():
    return training_of(classifier(nn.BatchNorm1d(12)))


@scenario("batch normalisation with a cumulative average and fused AdamW")
def cumulative():
    return training_of(
        classifier(nn.BatchNorm1d(12, momentum=None)),
        optimizer=lambda ps: torch.optim.AdamW(ps, lr=0.05, fused=True),
    )


@scenario("instance normalisation with running statistics", of="model")
class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3)
        self.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        self.head = nn.Linear(4, NUM_CLASSES)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x.unsqueeze(1)))).mean(2))


@scenario("spectral norm, as a parametrization")
def spectral():
    return training_of(classifier(parametrizations.spectral_norm(nn.Linear(12, 12))))


@scenario("spectral norm, as hooks")
def spectral_hooks():
    with warnings.catch_warnings(action="ignore"):
        layer = nn.utils.spectral_norm(nn.Linear(12, 12))
    return training_of(classifier(layer))


class Averaged(nn.Module):
    """A parametrization that averages the weights it has seen."""

    def __init__(self):
        super().__init__()
        self.mean = None
        self.num_calls = 0

    def forward(self, weight):
        self.num_calls += 1
        seen = weight.detach()
        self.mean = seen.clone() if self.mean is None else 0.9 * self.mean + 0.1 * seen
        return weight - 0.1 * self.mean


@scenario("parametrization with a state in attributes")
def parametrized():
    layer = nn.Linear(12, 12)
    parametrize.register_parametrization(layer, "weight", Averaged())
    return training_of(classifier(layer))


@scenario("recurrent state kept as an attribute", of="model")
class Recurrent(nn.Module):
    """Goes on from the hidden state of the batch before."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, 12)
        self.head = nn.Linear(12, NUM_CLASSES)
        self.hidden = None

    def forward(self, x):
        hidden = self.cell(x, self.hidden)
        self.hidden = hidden.detach()
        return self.head(hidden)


@scenario("recurrent state kept in a list in the loss's closure")
def recurrent_in_closure():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTMCell(WIDTH, 12)
            self.head = nn.Linear(12, NUM_CLASSES)

    states = []

    def loss(model, batch):
        h, c = model.lstm(batch[0], states[-1] if states else None)
        states.append((h.detach(), c.detach()))
        del states[:-1]
        return F.cross_entropy(model.head(h), batch[1])

    return training_of(Cell(), loss=loss)


class Queue(nn.Module):
    """The queue of MoCo, with its pointer."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, 8)
        self.key = nn.Linear(WIDTH, 8).requires_grad_(False)
        self.key.load_state_dict(self.query.state_dict())
        self.register_buffer("queue", F.normalize(torch.randn(8, 32), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        q = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            for mine, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                mine.data = mine.data * 0.9 + theirs.data * 0.1
            k = F.normalize(self.key(x), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone()], 1) / 0.2
        with torch.no_grad():
            at = int(self.pointer)
            self.queue[:, at : at + len(k)] = k.T
            self.pointer[0] = (at + len(k)) % self.queue.shape[1]
        return logits


@scenario("MoCo: queue, pointer and key encoder")
def moco():
    def loss(model, batch):
        logits = model(batch[0])
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))

    return training_of(Queue(), loss=loss)


@scenario("VQ codebook moved by averages, one of them no buffer", of="model")
class Codebook(nn.Module):
    """Vector quantisation with exponential moving averages."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(WIDTH, 4)
        self.head = nn.Linear(4, NUM_CLASSES)
        self.register_buffer("codes", torch.randn(16, 4))
        self.register_buffer("counts", torch.ones(16))
        self.sums = self.codes.clone()  # not a buffer

    def forward(self, x):
        z = self.encoder(x)
        chosen = torch.cdist(z, self.codes).argmin(1)
        picked = self.codes[chosen]
        if self.training:
            with torch.no_grad():
                one_hot = F.one_hot(chosen, 16).float()
                self.counts.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(one_hot.T @ z, alpha=0.1)
                self.codes.copy_(self.sums / self.counts.clamp_min(1e-2)[:, None])
        return self.head(z + (picked - z).detach())


@scenario("buffer that grows by torch.cat", of="model")
class Growing(nn.Module):
    """Rebinds a buffer to a longer one in every forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 8)
        self.head = nn.Linear(8, NUM_CLASSES)
        self.register_buffer("memory", torch.zeros(0, 8))

    def forward(self, x):
        h = torch.tanh(self.layer(x))
        if len(self.memory):
            h = h + 0.1 * (h @ self.memory.T).softmax(1) @ self.memory
        self.memory = torch.cat([self.memory, h.detach()])
        return self.head(h)


@scenario("buffer that is resized in place", of="model")
class Resized(nn.Module):
    """Makes a buffer larger in place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 8)
        self.head = nn.Linear(8, NUM_CLASSES)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        before = len(self.seen)
        self.seen.resize_(before + 1)
        self.seen[before] = x.detach().mean()
        return self.head(torch.tanh(self.layer(x)) * (1 + 0.1 * self.seen.mean()))


@scenario("memory bank in a deque, counters and a cache in dictionaries")
def bank():
    class Bank(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, 8)
            self.head = nn.Linear(8, NUM_CLASSES)
            self.features = deque(maxlen=3)
            self.cache = {}
            self.num_seen = 0

        def forward(self, x):
            h = torch.tanh(self.layer(x))
            if self.features:
                h = h + 0.1 * torch.stack([f.mean(0) for f in self.features]).mean(0)
            self.features.append(h.detach())
            self.num_seen += len(x)
            self.cache[self.num_seen % 5] = h.detach().mean()
            return self.head(h) * (1 + 0.01 * sum(self.cache.values()))

    model = Bank()
    return training_of(model, started=lambda run: (model.features.clear(), model.cache.clear()))


class Slotted:
    """State in slots."""

    __slots__ = ("count", "scale")

    def __init__(self):
        self.count = 0
        self.scale = torch.ones(1)


@scenario("state in slots, behind a property", of="layer")
class WithSlots(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 12)
        self._inner = Slotted()

    @property
    def scale(self):
        return self._inner.scale

    def forward(self, x):
        self._inner.count += 1
        y = self.layer(x) * self.scale
        self._inner.scale = self.scale * 0.95 + 0.05 * float(y.detach().abs().mean())
        return y


class Counted(torch.autograd.Function):
    """Counts its calls on the class, in both directions."""

    num_forward = 0
    num_backward = 0
    scale = 1.0

    @staticmethod
    def forward(ctx, x):
        Counted.num_forward += 1
        ctx.factor = Counted.scale
        return x * Counted.scale

    @staticmethod
    def backward(ctx, grad):
        Counted.num_backward += 1
        Counted.scale = 0.95 * Counted.scale + 0.01 * Counted.num_backward
        return grad * ctx.factor


@scenario("custom autograd.Function with counters on its class")
def counted_function():
    Counted.num_forward = Counted.num_backward = 0
    Counted.scale = 1.0

    class Layer(nn.Module):
        def forward(self, x):
            return Counted.apply(x)

    return training_of(classifier(Layer()), watched=[Counted])


@scenario("forward hook that keeps a running average and a count")
def forward_hook():
    model = classifier(nn.Linear(12, 12))
    seen = {"mean": torch.zeros(12), "count": 0}

    def hook(module, args, output):
        seen["count"] += 1
        seen["mean"].mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return output - 0.1 * seen["mean"]

    model[1].register_forward_hook(hook)
    return training_of(model, watched=[seen])


@scenario("hook on a parameter's gradient that keeps a running average")
def gradient_hook():
    model = classifier()
    averages = {}

    def hook_for(name):
        def hook(grad):
            averages[name] = 0.8 * averages.get(name, 0.0) + 0.2 * grad.detach()
            return grad + 0.1 * averages[name]

        return hook

    for name, p in model.named_parameters():
        p.register_hook(hook_for(name))
    return training_of(model, watched=[averages])


@scenario("module backward hook with a counter in a closure")
def backward_hook():
    model = classifier(nn.Linear(12, 12))
    num_calls = 0

    def hook(module, grad_input, grad_output):
        nonlocal num_calls
        num_calls += 1
        return tuple(None if g is None else g * (1 + 0.01 * num_calls) for g in grad_input)

    model[1].register_full_backward_hook(hook)
    return training_of(model, watched=[lambda: num_calls])


@scenario("hook that runs when a gradient is accumulated")
def accumulate_hook():
    model = classifier()
    norms = []

    def hook(p):
        norms.append(float(p.grad.norm()))
        p.grad.mul_(1.0 / (1.0 + 0.01 * len(norms)))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    return training_of(model, watched=[norms])


@scenario("loss with a running centre, temperature and prototypes", of="loss")
class Centre:
    def __init__(self):
        self.centre = torch.zeros(NUM_CLASSES)
        self.temperature = 1.0
        self.prototypes = {c: torch.zeros(NUM_CLASSES) for c in range(NUM_CLASSES)}

    def __call__(self, model, batch):
        out = model(batch[0])
        self.temperature = 0.99 * self.temperature + 0.01 * float(out.detach().std())
        value = F.cross_entropy((out - self.centre) / self.temperature, batch[1])
        self.centre = 0.9 * self.centre + 0.1 * out.detach().mean(0)
        for c, row in zip(batch[1].tolist(), out.detach(), strict=True):
            self.prototypes[c].lerp_(row, 0.1)
        return value + 0.01 * (out - self.prototypes[0]).square().mean()


@scenario("gradient norms kept for adaptive clipping in the loss")
def adaptive():
    model = classifier()
    norms = [1.0]

    def loss(model, batch):
        value = cross_entropy(model, batch)
        norms.append(0.9 * norms[-1] + 0.1 * float(value.detach()))
        return value / norms[-1]

    return training_of(model, loss=loss)
