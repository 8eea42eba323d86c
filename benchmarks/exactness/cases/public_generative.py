"""GANs, diffusion and quantised autoencoders, as public repositories train them."""

from __future__ import annotations

import math
import random

import torch
from torch import nn
from torch.nn import functional as F

from exactness.case import Theme
from exactness.parts import encoder, images, make_job, vectors

theme = Theme("public")


class StddevDiscriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.final = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(5, 1, 3)

    def forward(self, x):
        z = F.leaky_relu(self.conv(x), 0.2)
        n, c, h, w = z.shape
        group = min(n, 4) if n % min(n, 4) == 0 else 1
        spread = torch.sqrt(z.view(group, -1, 1, c, h, w).var(0, unbiased=False) + 1e-8)
        spread = spread.mean([2, 3, 4], keepdim=True).squeeze(2).repeat(group, 1, h, w)
        return self.final(torch.cat([z, spread], 1)).flatten(1).mean(1)


@theme.loss(
    StddevDiscriminator,
    lambda size: (images(size, extent=6), images(size, extent=6) + 0.5),
    8,
    adds="no",
    source="rosinality/stylegan2-pytorch model.py",
)
def minibatch_standard_deviation(model, batch):
    """A discriminator that sees the deviation over groups of its batch as a channel."""
    return F.softplus(-model(batch[0])).mean() + F.softplus(model(batch[1])).mean()


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.mapping = nn.Sequential(nn.Linear(12, 8), nn.LeakyReLU(0.2))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.out = nn.Linear(8, 12)

    def styles(self, latent):
        return self.mapping(latent).unsqueeze(1).repeat(1, 4, 1)

    def forward(self, styles):
        x = torch.ones_like(styles[:, 0])
        for layer, style in zip(self.layers, styles.unbind(1), strict=True):
            x = torch.tanh(layer(x * style))
        return self.out(x)


@theme.case(
    adds="no",
    draws="per-sample",
    leaves="different",
    source="rosinality/stylegan2-pytorch train.py (g_path_regularize)",
)
def path_length_regularisation():
    """Path lengths against their moving mean, which the batch has moved already."""
    moving = {"length": torch.zeros(())}

    def loss(model, latent):
        styles = model.styles(latent)
        image = model(styles)
        noise = torch.randn_like(image) / math.sqrt(image.shape[1])
        (slope,) = torch.autograd.grad((image * noise).sum(), styles, create_graph=True)
        lengths = slope.pow(2).sum(2).mean(1).sqrt()
        mean = moving["length"] + 0.1 * (lengths.detach().mean() - moving["length"])
        moving["length"] = mean
        return F.softplus(-image).mean() + 2 * (lengths - mean).pow(2).mean()

    return make_job(Generator, vectors, loss)


@theme.loss(
    Generator,
    lambda size: (vectors(size), vectors(size)),
    draws="shared",
    source="rosinality/stylegan2-pytorch model.py (style mixing)",
)
def style_mixing(model, batch):
    """``random`` draws the layer from which all samples take their second style."""
    one, other = (model.styles(latent) for latent in batch)
    place = random.randint(1, 3)
    return F.softplus(-model(torch.cat([one[:, :place], other[:, place:]], 1))).mean()


@theme.loss(
    lambda: encoder(1),
    lambda size: (vectors(size), vectors(size) + 0.5),
    source="CompVis/taming-transformers taming/modules/losses/vqperceptual.py (hinge)",
)
def hinge_discriminator(model, batch):
    """Hinge loss of real and generated samples."""
    real, fake = (model(x) for x in batch)
    return 0.5 * (F.relu(1 - real).mean() + F.relu(1 + fake).mean())


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = encoder(6), nn.Linear(6, 12)
        self.codes = nn.Embedding(8, 6)
        self.critic = encoder(1).requires_grad_(False)

    def forward(self, x):
        z = self.encode(x)
        distance = z.pow(2).sum(1, keepdim=True) + self.codes.weight.pow(2).sum(1)
        index = (distance - 2 * z @ self.codes.weight.t()).argmin(1, keepdim=True)
        hits = torch.zeros(len(z), 8).scatter_(1, index, 1)
        q = hits @ self.codes.weight
        value = (q.detach() - z).pow(2).mean() + 0.25 * (q - z.detach()).pow(2).mean()
        return self.decode(z + (q - z).detach()), value


@theme.loss(
    Autoencoder, vectors, source="CompVis/taming-transformers taming/modules/vqvae/quantize.py"
)
def vq_with_a_learned_codebook(model, x):
    """A codebook that is a parameter; code and commitment terms are means."""
    y, value = model(x)
    return F.l1_loss(y, x) + value


@theme.loss(
    Autoencoder,
    vectors,
    adds="no",
    source="CompVis/taming-transformers taming/modules/losses/vqperceptual.py",
)
def adversarial_weight_by_gradient_norms(model, x):
    """The adversarial term's weight is a ratio of two gradients' norms at the last layer."""
    y, value = model(x)
    reconstruction, adversarial = (y - x).abs().mean(), -model.critic(y).mean()
    last = model.decode.weight
    (a,) = torch.autograd.grad(reconstruction, last, retain_graph=True)
    (b,) = torch.autograd.grad(adversarial, last, retain_graph=True)
    weight = (a.norm() / (b.norm() + 1e-4)).clamp(0, 1e4).detach()
    return reconstruction + 0.8 * weight * adversarial + value


class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(12, 6), nn.Linear(6, 12)
        self.register_buffer("embed", torch.randn(8, 6))
        self.register_buffer("cluster_size", torch.full((8,), 2.0))

    def forward(self, x):
        z = self.encode(x)
        index = torch.cdist(z, self.embed).argmin(1)
        q = self.embed[index]
        hits = F.one_hot(index, 8).to(z.dtype)
        with torch.no_grad():
            self.cluster_size.lerp_(hits.sum(0), 0.2)
            dead = self.cluster_size < 1.8
            if bool(dead.any()):
                chosen = torch.randperm(len(z))[torch.arange(int(dead.sum())) % len(z)]
                self.embed[dead] = z[chosen]
                self.cluster_size[dead] = 2.0
        return self.decode(z + (q - z).detach()), F.mse_loss(z, q.detach())


@theme.loss(
    Codebook,
    vectors,
    adds="no",
    draws="shared",
    leaves="different",
    source="lucidrains/vector-quantize-pytorch vector_quantize_pytorch/vector_quantize_pytorch.py",
)
def dead_codes_replaced_from_the_batch(model, x):
    """Codes that few samples use are replaced by samples drawn from the batch, in forward."""
    y, value = model(x)
    return F.mse_loss(y, x) + value


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(10, 24)
        self.body = nn.Sequential(nn.Linear(24, 24), nn.SiLU(), nn.Linear(24, 12))

    def forward(self, x, t, condition=None):
        condition = torch.zeros_like(x) if condition is None else condition
        return self.body(torch.cat([x, condition], 1) + self.time(t))


def add_noise(x, noise, t):
    keep = torch.linspace(0.99, 0.05, 10)[t].view(-1, 1)
    return keep.sqrt() * x + (1 - keep).sqrt() * noise


@theme.loss(
    Denoiser,
    vectors,
    draws="shared",
    source="lucidrains/denoising-diffusion-pytorch denoising_diffusion_pytorch.py (p_losses)",
)
def self_conditioning(model, x):
    """With ``random() < 0.5`` the whole batch is conditioned on its own first guess."""
    t, noise = torch.randint(0, 10, (len(x),)), torch.randn_like(x)
    noisy, guess = add_noise(x, noise, t), None
    if random.random() < 0.5:
        with torch.no_grad():
            guess = model(noisy, t)
    losses = F.l1_loss(model(noisy, t, guess), noise, reduction="none").mean(1)
    return (losses * torch.linspace(1.0, 0.2, 10)[t]).mean()


@theme.loss(
    Denoiser,
    vectors,
    draws="per-sample",
    source="huggingface/diffusers examples/dreambooth/train_dreambooth.py (snr_gamma)",
)
def min_snr_weights(model, x):
    """Weights by the signal-to-noise ratio of each sample's own timestep; offset noise."""
    noise = torch.randn_like(x) + 0.1 * torch.randn(x.shape[0], 1)
    t = torch.randint(0, 10, (x.shape[0],)).long()
    keep = torch.linspace(0.99, 0.05, 10)[t]
    ratio = keep / (1 - keep)
    weight = torch.stack([ratio, 5.0 * torch.ones_like(ratio)], dim=1).min(dim=1)[0] / ratio
    losses = F.mse_loss(model(add_noise(x, noise, t), t), noise, reduction="none")
    return (losses.mean(dim=list(range(1, losses.dim()))) * weight).mean()


@theme.loss(
    Denoiser,
    lambda size: torch.cat([vectors(size), vectors(size) + 1.0]),
    adds="no",
    draws="per-sample",
    source="huggingface/diffusers examples/dreambooth/train_dreambooth.py (prior preservation)",
)
def prior_preservation(model, x):
    """The collator puts instance images before class images; the loss chunks them apart."""
    noise, t = torch.randn_like(x), torch.randint(0, 10, (x.shape[0],))
    mine, prior = model(add_noise(x, noise, t), t).chunk(2, dim=0)
    target, target_prior = noise.chunk(2, dim=0)
    return F.mse_loss(mine, target) + 0.3 * F.mse_loss(prior, target_prior)
