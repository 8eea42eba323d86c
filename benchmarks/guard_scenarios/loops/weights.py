"""Weights that are changed outside the optimizer, and copies of them that follow."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from guard_scenarios.training import (
    NUM_CLASSES,
    WIDTH,
    adamw,
    classifier,
    cross_entropy,
    labelled,
    scenario,
    training_of,
)

BETWEEN = "between steps"


@scenario("critic clipped through .data after every step", may_end=BETWEEN)
def clipped_critic():
    critic = nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, 1))

    def loss(model, batch):
        real, _ = batch
        fake = torch.randn_like(real)
        return model(fake).mean() - model(real).mean()

    def clip(run, number):
        for p in critic.parameters():
            p.data.clamp_(-0.05, 0.05)

    return training_of(
        critic, loss=loss, optimizer=lambda ps: torch.optim.RMSprop(ps, lr=0.02), after=clip
    )


@scenario("critic clipped under no_grad before every step", may_end=BETWEEN)
def clipped_without_grad():
    critic = nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, 1))

    @torch.no_grad()
    def clip(run, number):
        for p in run.model.parameters():
            p.clamp_(-0.05, 0.05)

    return training_of(critic, loss=lambda m, b: -m(b[0]).mean(), before=clip)


@scenario("one weight of a large layer set through .data once", may_end=BETWEEN)
def one_weight_set():
    model = nn.Sequential(nn.Linear(WIDTH, 300), nn.ReLU(), nn.Linear(300, NUM_CLASSES))

    def after(run, number):
        if number == 2:
            model[0].weight.data[217, 3] = 0.75

    return training_of(model, after=after)


@scenario("rows of an embedding that no batch uses renormalised through numpy", may_end=BETWEEN)
def unused_rows():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(50, 8)
            self.head = nn.Linear(8, NUM_CLASSES)

        def forward(self, x):
            return self.head(self.table(x.abs().long() % 5).mean(1))

    model = Words()

    def after(run, number):
        model.table.weight.detach().numpy()[20 + number] *= 0.5

    return training_of(model, after=after, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))


@scenario("weights perturbed in the loss and put back")
def perturbed_in_loss():
    model = classifier()

    def loss(model, batch):
        plain = cross_entropy(model, batch)
        grads = torch.autograd.grad(plain, list(model.parameters()))
        with torch.no_grad():
            moves = [0.05 * g / (g.norm() + 1e-12) for g in grads]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.data.add_(move)
        sharp = cross_entropy(model, batch)
        grads = torch.autograd.grad(sharp, list(model.parameters()))
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.data.sub_(move)
        surrogate = sum((p * g).sum() for p, g in zip(model.parameters(), grads, strict=True))
        return surrogate - surrogate.detach() + sharp.detach()

    return training_of(model, loss=loss)


@scenario("noise on the weights in forward, taken off again")
def noisy_weights():
    class Noisy(nn.Linear):
        def forward(self, x):
            clean = self.weight.data.clone()
            self.weight.data.add_(0.01 * torch.randn_like(clean))
            y = F.linear(x, self.weight.clone(), self.bias)
            self.weight.data.copy_(clean)
            return y

    return training_of(classifier(Noisy(12, 12)))


@scenario("EMA teacher in the model, moved in forward")
def teacher_in_forward():
    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.student = classifier(dropout=0.0)
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    t.lerp_(s, 0.1)
            return self.student(x), self.teacher(x)

    def loss(model, batch):
        mine, theirs = model(batch[0])
        return F.cross_entropy(mine, batch[1]) + F.mse_loss(mine, theirs)

    model = Student()
    return training_of(model, loss=loss, optimizer=lambda ps: adamw(model.student.parameters()))


@scenario("EMA teacher in the loss's closure, moved in the loss")
def teacher_in_loss():
    model = classifier()
    teacher = copy.deepcopy(model).eval()

    def loss(model, batch):
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), model.parameters(), strict=True):
                t.data.mul_(0.9).add_(s.data, alpha=0.1)
            target = teacher(batch[0])
        return F.mse_loss(model(batch[0]), target) + cross_entropy(model, batch)

    return training_of(model, loss=loss)


@scenario("EMA teacher in the loss's closure, moved by the caller", may_end=BETWEEN)
def teacher_by_caller():
    model = classifier()
    teacher = copy.deepcopy(model).eval().requires_grad_(False)

    def loss(model, batch):
        return F.mse_loss(model(batch[0]), teacher(batch[0])) + cross_entropy(model, batch)

    def after(run, number):
        for t, s in zip(teacher.parameters(), run.model.parameters(), strict=True):
            t.data.lerp_(s.data, 0.2)

    return training_of(model, loss=loss, after=after)


@scenario("weight average that nothing reads, updated by the caller")
def average_by_caller():
    model = classifier()
    average = torch.optim.swa_utils.AveragedModel(model)
    return training_of(
        model, after=lambda run, number: average.update_parameters(run.model), watched=[average]
    )


@scenario("SWA model updated by a hook of the optimizer")
def average_in_hook():
    model = classifier()
    average = torch.optim.swa_utils.AveragedModel(model)

    def started(run):
        run.optimizer.register_step_post_hook(
            lambda opt, args, kwargs: average.update_parameters(model)
        )

    return training_of(model, started=started, watched=[average])


@scenario("gradients of another loss added before run.step")
def gradients_before():
    model = classifier()
    others = labelled(6)

    def before(run, number):
        (0.1 * cross_entropy(model, others[number])).backward()

    return training_of(model, before=before, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))


@scenario("gradient of one parameter set by the caller")
def gradient_set():
    model = classifier()

    def before(run, number):
        if number % 2:
            model[0].weight.grad = torch.full_like(model[0].weight, 0.01 * number)

    return training_of(model, before=before)


@scenario("tied weights", of="model")
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.Linear(WIDTH, WIDTH)
        self.decoder.weight = self.encoder.weight
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x):
        return self.head(self.decoder(torch.tanh(self.encoder(x))))


@scenario("frozen layers, thawed by the caller on the way", may_end=BETWEEN)
def thawed():
    model = classifier()
    model[0].requires_grad_(False)

    def before(run, number):
        if number == 3:
            model[0].requires_grad_(True)

    return training_of(model, before=before)


@scenario("layer replaced by a new one on the way", may_end=BETWEEN)
def replaced():
    model = classifier()

    def before(run, number):
        if number == 2:
            model[3] = nn.Linear(12, NUM_CLASSES)
            run.optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.01})

    return training_of(model, before=before)


@scenario("pruned through a mask of the caller's after every step", may_end=BETWEEN)
def pruned():
    model = classifier()
    mask = torch.rand(12, WIDTH) > 0.3

    def after(run, number):
        with torch.no_grad():
            model[0].weight.mul_(mask)

    return training_of(model, after=after)
