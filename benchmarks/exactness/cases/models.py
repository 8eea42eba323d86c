"""Convolutional, generative, geometric and graph models with the losses they usually have."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from exactness.case import Theme
from exactness.parts import (
    Modules,
    cross_entropy,
    encoder,
    images,
    labelled,
    labelled_images,
    make_job,
    segmented,
    vectors,
)

theme = Theme("blind")


@theme.model(labelled_images, cross_entropy, 8)
def conv_net():
    """Convolutions, pooling, a linear head."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.out = nn.Conv2d(12, 1, 3, padding=1)

    def forward(self, x):
        skip = self.down1(x)
        z = self.up(self.down2(F.max_pool2d(skip, 2)))
        return self.out(torch.cat([z, skip], dim=1))


@theme.loss(UNet, segmented, 8)
def u_net(model, batch):
    """A U-Net with skip connections and a loss per pixel."""
    return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


def small_decoder():
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 3, 3, padding=1))


@theme.loss(small_decoder, images, 8)
def ssim(model, x):
    """Structural similarity of each image with its reconstruction."""
    y = model(x)
    mx, my = F.avg_pool2d(x, 3), F.avg_pool2d(y, 3)
    vx, vy = F.avg_pool2d(x * x, 3) - mx**2, F.avg_pool2d(y * y, 3) - my**2
    cov = F.avg_pool2d(x * y, 3) - mx * my
    map_ = (2 * mx * my + 0.01) * (2 * cov + 0.03)
    return 1 - (map_ / ((mx**2 + my**2 + 0.01) * (vx + vy + 0.03))).mean()


def perceptual():
    return Modules(
        generator=nn.Conv2d(3, 3, 3, padding=1),
        features=nn.ModuleList([nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 3)]).requires_grad_(False),
    )


@theme.loss(perceptual, images, 8)
def perceptual_features(model, x):
    """Features of a frozen net, of each image and its reconstruction, are held together."""
    a, b = x, model.generator(x)
    total = F.l1_loss(b, a)
    for layer in model.features:
        a, b = F.relu(layer(a)), F.relu(layer(b))
        total = total + 0.1 * F.mse_loss(b, a.detach())
    return total


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = encoder(8), nn.Linear(4, 12)

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, dim=1)
        z = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        return self.decode(z), mean, log_variance


def divergence(mean, log_variance):
    return -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp())


@theme.loss(Vae, vectors, draws="per-sample")
def vae(model, x):
    """Reconstruction and KL divergence, summed over the latent, meaned over the batch."""
    y, mean, log_variance = model(x)
    kl = divergence(mean, log_variance).sum(1).mean()
    return F.mse_loss(y, x, reduction="none").sum(1).mean() + kl


@theme.loss(Vae, vectors, draws="per-sample", adds="no")
def vae_with_a_mean_and_a_sum(model, x):
    """Reconstruction is meaned, the KL divergence summed over the batch too: a common slip."""
    y, mean, log_variance = model(x)
    return F.mse_loss(y, x) + 0.1 * divergence(mean, log_variance).sum()


@theme.loss(Vae, vectors, draws="per-sample", adds="no")
def vae_with_the_aggregate_posterior(model, x):
    """Total correlation: each latent is held against those of the whole batch (beta-TCVAE)."""
    y, mean, log_variance = model(x)
    z = mean
    density = -((z[:, None] - mean[None]) ** 2 / log_variance.exp()[None] + log_variance[None])
    joint = torch.logsumexp(density.sum(2), dim=1)
    product = torch.logsumexp(density, dim=1).sum(1)
    return F.mse_loss(y, x) + 0.1 * (joint - product).mean()


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.body = nn.Embedding(10, 12), encoder(12)

    def forward(self, x, t):
        return self.body(x + self.time(t))


def noised(x, noise, t):
    keep = torch.linspace(0.99, 0.05, 10)[t].view(-1, 1)
    return keep.sqrt() * x + (1 - keep).sqrt() * noise


@theme.loss(Denoiser, vectors, draws="per-sample")
def diffusion(model, x):
    """Noise by ``randn_like`` and a random timestep of each sample's own."""
    noise = torch.randn_like(x)
    t = torch.randint(0, 10, (x.shape[0],))
    return F.mse_loss(model(noised(x, noise, t), t), noise)


@theme.loss(Denoiser, vectors, draws="shared")
def diffusion_with_one_timestep(model, x):
    """One random timestep for the whole batch."""
    noise = torch.randn_like(x)
    t = torch.randint(0, 10, (1,)).expand(x.shape[0])
    return F.mse_loss(model(noised(x, noise, t), t), noise)


@theme.case(draws="per-sample")
def flow_matching():
    """Rectified flow: a line between noise and data, at a random place."""

    class Velocity(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(13, 24), nn.SiLU(), nn.Linear(24, 12))

        def forward(self, x, t):
            return self.body(torch.cat([x, t], dim=1))

    def loss(model, x):
        start, t = torch.randn_like(x), torch.rand(len(x), 1)
        return (model((1 - t) * start + t * x, t) - (x - start)).square().mean()

    return make_job(Velocity, vectors, loss)


@theme.case()
def nerf_like_rays():
    """Colours along rays by volume rendering; each sample is a ray."""

    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 4))

        def forward(self, origins, directions):
            depths = torch.linspace(0.1, 1.0, 6)
            points = origins[:, None] + depths[None, :, None] * directions[:, None]
            raw = self.body(torch.cat([points.sin(), points.cos()], dim=-1))
            alpha = 1 - torch.exp(-F.relu(raw[..., 3]) * 0.2)
            clear = torch.cumprod(1 - alpha + 1e-10, dim=-1).roll(1, dims=-1)
            clear = torch.cat([torch.ones_like(clear[:, :1]), clear[:, 1:]], dim=-1)
            return ((alpha * clear)[..., None] * raw[..., :3].sigmoid()).sum(1)

    def batch(size):
        return torch.randn(size, 3), F.normalize(torch.randn(size, 3), dim=-1), torch.rand(size, 3)

    return make_job(Field, batch, lambda m, b: F.mse_loss(m(b[0], b[1]), b[2]))


class DeepSets(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.phi, self.rho, self.pool = encoder(8), nn.Linear(8, 4), pool

    def forward(self, x):
        return self.rho(self.pool(self.phi(x)))


def point_sets(size):
    return torch.randn(size, 6, 12), labelled(size)[1]


@theme.case()
def deep_sets():
    """DeepSets: a sum over the elements of each set."""
    return make_job(lambda: DeepSets(lambda z: z.sum(1)), point_sets, cross_entropy)


@theme.case()
def point_net():
    """PointNet: a maximum over the points of each cloud."""
    return make_job(lambda: DeepSets(lambda z: z.amax(1)), point_sets, cross_entropy)


@theme.loss(lambda: encoder(3), point_sets)
def chamfer_distance(model, batch):
    """Chamfer distance between each cloud and its reconstruction."""
    target = batch[0][..., :3]
    d = torch.cdist(model(batch[0]), target)
    return (d.amin(1).mean(1) + d.amin(2).mean(1)).mean()


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def dense(self, x, adjacency):
        adjacency = adjacency / adjacency.sum(-1, keepdim=True).clamp(min=1)
        z = torch.relu(adjacency @ self.one(x))
        return self.head(torch.relu(adjacency @ self.two(z)).mean(1))

    def sparse(self, x, edges, graph, num_graphs):
        for layer in (self.one, self.two):
            z = layer(x)
            x = torch.relu(torch.zeros_like(z).index_add(0, edges[1], z[edges[0]]))
        return self.head(torch.zeros(num_graphs, 8).index_add(0, graph, x))


@theme.case()
def graphs_with_dense_adjacency():
    """A graph net with each sample's own adjacency matrix."""

    def batch(size):
        x, y = point_sets(size)
        return x, (torch.rand(size, 6, 6) < 0.4).float(), y

    return make_job(Graph, batch, lambda m, b: F.cross_entropy(m.dense(b[0], b[1]), b[2]))


def disjoint_union(size):
    start = 5 * torch.arange(size).repeat_interleave(7)
    edges = torch.randint(0, 5, (2, 7 * size)) + start
    graph = torch.arange(size).repeat_interleave(5)
    return {
        "x": torch.randn(5 * size, 12),
        "edges": edges,
        "graph": graph,
        "y": labelled(size)[1],
    }


@theme.loss(Graph, disjoint_union, adds="no")
def graphs_as_a_disjoint_union(model, batch):
    """All graphs of the batch are one; edges have global numbers, so the batch cannot be cut."""
    y = batch["y"]
    return F.cross_entropy(model.sparse(batch["x"], batch["edges"], batch["graph"], len(y)), y)


def ring_of_nodes(size):
    x, y = labelled(size)
    return x, torch.stack([torch.arange(size), (torch.arange(size) + 1) % size]), y


@theme.loss(Graph, ring_of_nodes, adds="no")
def nodes_of_one_graph(model, x, edges, y):
    """Transductive training: samples are the nodes of one graph, which pass messages."""
    z = model.one(x)
    z = z + torch.zeros_like(z).index_add(0, edges[1], z[edges[0]])
    return F.cross_entropy(model.head(torch.relu(z)), y)


@theme.loss(
    lambda: Modules(actor=encoder(4), critic=encoder(1)),
    lambda size: (*labelled(size), torch.randn(size), torch.randn(size), -torch.rand(size) - 0.5),
)
def actor_critic(model, batch):
    """PPO's clipped objective with advantages as the buffer gave them."""
    x, action, advantage, returns, old = batch
    logp = model.actor(x).log_softmax(-1)
    ratio = (logp.gather(1, action[:, None]).squeeze(1) - old).exp()
    clipped = ratio.clamp(0.8, 1.2) * advantage
    policy = -torch.min(ratio * advantage, clipped).mean()
    value = 0.5 * (model.critic(x).squeeze(-1) - returns).pow(2).mean()
    return policy + value + 0.01 * (logp.exp() * logp).sum(-1).mean()


@theme.loss(lambda: encoder(4), lambda size: (*labelled(size), torch.randn(size)), adds="no")
def advantages_normalised_over_the_batch(model, x, action, advantage):
    """The same policy gradient with advantages whitened over the batch."""
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    logp = model(x).log_softmax(-1).gather(1, action[:, None]).squeeze(1)
    return -(logp * advantage).mean()
