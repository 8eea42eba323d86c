"""Losses that take gradients, and parameters and functions that change them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from exactness.case import Theme
from exactness.parts import Modules, classifier, cross_entropy, encoder, labelled, make_job, vectors

theme = Theme("blind")


@theme.loss(classifier, labelled, adds="no")
def gradient_norm_of_parameters_in_the_loss(model, batch):
    """Double backward: the norm of the parameters' gradient is a penalty."""
    value = cross_entropy(model, batch)
    gradients = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
    return value + 0.1 * sum(g.pow(2).sum() for g in gradients)


@theme.model(labelled, cross_entropy, adds="no")
def gradient_norm_in_a_hook():
    """A hook of a weight shrinks its gradient by the gradient's own norm."""
    found = classifier()
    found[0].weight.register_hook(lambda g: g / (1 + 10 * g.norm()))
    return found


@theme.model(labelled, cross_entropy, adds="no")
def gradient_clamped_by_a_hook():
    """``register_hook(clamp)`` on every parameter."""
    found = classifier()
    for parameter in found.parameters():
        parameter.register_hook(lambda g: g.clamp(-0.005, 0.005))
    return found


@theme.model(labelled, cross_entropy)
def gradient_scaled_by_a_hook():
    """``register_hook`` that multiplies by a constant, which is linear."""
    found = classifier()
    found[0].weight.register_hook(lambda g: g * 0.1)
    return found


@theme.model(labelled, cross_entropy, adds="no")
def clipped_after_accumulation():
    """A hook after accumulation clips each parameter's gradient."""

    def clip(parameter):
        parameter.grad.mul_((0.01 / (parameter.grad.norm() + 1e-6)).clamp(max=1.0))

    found = classifier()
    for parameter in found.parameters():
        parameter.register_post_accumulate_grad_hook(clip)
    return found


@theme.model(labelled, cross_entropy, adds="no")
def scaled_after_accumulation():
    """A hook after accumulation halves the gradient, once per backward."""

    def halve(parameter):
        parameter.grad.mul_(0.5)

    found = classifier()
    found[2].weight.register_post_accumulate_grad_hook(halve)
    return found


@theme.case(leaves="different")
def gradient_norms_noted_by_a_hook():
    """A hook keeps the norms of the gradients that it sees."""

    class Noting(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.norms = classifier(), []
            self.body[0].weight.register_hook(lambda g: self.norms.append(float(g.norm())))

        def forward(self, x):
            return self.body(x)

    return make_job(Noting, labelled, cross_entropy)


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.strength * grad, None


class DomainAdversarial(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.label, self.domain = encoder(), nn.Linear(8, 4), nn.Linear(8, 2)

    def forward(self, x):
        z = torch.relu(self.features(x))
        return self.label(z), self.domain(Reversal.apply(z, 0.5))


@theme.loss(DomainAdversarial, lambda size: (*labelled(size), torch.arange(size) % 2))
def gradient_reversal(model, x, y, domain):
    """Domain-adversarial training with a gradient reversal layer."""
    label, guess = model(x)
    return F.cross_entropy(label, y) + F.cross_entropy(guess, domain)


class Through(nn.Module):
    """A body and a head, and a custom Function between them."""

    def __init__(self, function):
        super().__init__()
        self.body, self.head, self.function = encoder(), nn.Linear(8, 4), function

    def forward(self, x):
        return self.head(self.function.apply(self.body(x)))


class Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad - 0.5 * grad.mean(dim=0, keepdim=True)


@theme.case(adds="no")
def backward_that_mixes_the_batch():
    """A custom Function: forward is the identity, backward subtracts the batch's mean gradient."""
    return make_job(lambda: Through(Centred), labelled, cross_entropy)


class UnitGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / grad.norm().clamp_min(1e-9)


@theme.case(adds="no")
def backward_that_normalises_the_gradient():
    """A custom Function whose backward gives the whole batch's gradient norm one."""
    return make_job(lambda: Through(UnitGradient), labelled, cross_entropy)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


@theme.case()
def straight_through_per_sample():
    """Binarised activations with a straight-through estimator."""
    return make_job(lambda: Through(Sign), labelled, cross_entropy)


def real_and_fake(size):
    return torch.randn(size, 12), torch.randn(size, 12) + 0.5


@theme.loss(
    lambda: encoder(1),
    real_and_fake,
    draws="per-sample",
)
def wgan_gp(critic, real, fake):
    """A critic with a gradient penalty on each sample's own input."""
    share = torch.rand(len(real), 1)
    mixed = (share * real + (1 - share) * fake).requires_grad_(True)
    (gradient,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    penalty = (gradient.norm(2, dim=1) - 1).pow(2).mean()
    return critic(fake).mean() - critic(real).mean() + 10 * penalty


@theme.loss(lambda: encoder(1), real_and_fake)
def r1_penalty(discriminator, real, fake):
    """A discriminator with R1 on the real samples."""
    real = real.detach().requires_grad_(True)
    score = discriminator(real)
    (gradient,) = torch.autograd.grad(score.sum(), real, create_graph=True)
    r1 = gradient.pow(2).sum(1).mean()
    return F.softplus(-score).mean() + F.softplus(discriminator(fake)).mean() + 5 * r1


@theme.loss(classifier, labelled, adds="no")
def fast_gradient_sign_of_the_mean_loss(model, x, y):
    """Adversarial training whose step on the inputs is scaled by the batch's gradient norm."""
    x = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    return F.cross_entropy(model((x + 0.5 * gradient / gradient.norm()).detach()), y)


@theme.loss(classifier, labelled)
def fast_gradient_sign_per_sample(model, x, y):
    """Adversarial training by the sign of each sample's own gradient."""
    x = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), x)
    return F.cross_entropy(model((x + 0.1 * gradient.sign()).detach()), y)


@theme.loss(lambda: Modules(weight=nn.Parameter(torch.randn(4, 12) * 0.3)), labelled, adds="no")
def inner_step_of_meta_learning(model, x, y):
    """MAML in the loss: weights take one step on the batch's own mean loss."""
    inner = F.cross_entropy(F.linear(x, model.weight), y)
    (gradient,) = torch.autograd.grad(inner, model.weight, create_graph=True)
    return F.cross_entropy(F.linear(x.flip(1), model.weight - 0.5 * gradient), y)


@theme.loss(lambda: encoder(1), lambda size: (vectors(size), torch.randn(size, 12)))
def energy_and_forces(model, positions, forces):
    """Forces are the negative gradient of each sample's own energy."""
    positions = positions.clone().requires_grad_(True)
    energy = model(positions)
    (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
    return F.mse_loss(-slope, forces) + 0.1 * energy.pow(2).mean()
