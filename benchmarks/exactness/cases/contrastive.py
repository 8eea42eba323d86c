"""Losses that compare samples: with each other, with a bank, or with prototypes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from exactness.case import Theme
from exactness.parts import encoder, labelled, two_views

theme = Theme("blind")


@theme.loss(encoder, labelled, adds="no")
def supervised_contrastive(model, x, y):
    """Pairs of the same label within the batch attract each other."""
    z = F.normalize(model(x), dim=1)
    logits = z @ z.T / 0.1
    self_mask = torch.eye(len(z), dtype=torch.bool)
    logits = logits.masked_fill(self_mask, -1e9)
    positives = (y[:, None] == y[None, :]) & ~self_mask
    log_prob = F.log_softmax(logits, dim=1)
    return -((log_prob * positives).sum(1) / positives.sum(1).clamp(min=1)).mean()


@theme.loss(encoder, labelled, adds="no")
def triplet_batch_hard(model, x, y):
    """Triplet loss with the farthest positive and the nearest negative in the batch."""
    d = torch.cdist(model(x), model(x))
    same = y[:, None] == y[None, :]
    hardest_positive = (d * same).max(dim=1).values
    hardest_negative = d.masked_fill(same, float("inf")).min(dim=1).values
    return F.relu(hardest_positive - hardest_negative + 0.5).mean()


@theme.loss(encoder, lambda size: tuple(torch.randn(size, 12) for _ in range(3)))
def triplet_given(model, batch):
    """Triplets that come ready from the loader."""
    anchor, positive, negative = (model(x) for x in batch)
    return F.triplet_margin_loss(anchor, positive, negative, margin=1.0)


@theme.loss(encoder, two_views, adds="no")
def info_nce(model, batch):
    """In-batch negatives in one direction."""
    query, key = (F.normalize(model(x), dim=-1) for x in batch)
    return F.cross_entropy(query @ key.T / 0.07, torch.arange(len(query)))


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = encoder(), encoder()
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        image = F.normalize(self.image(image), dim=-1)
        text = F.normalize(self.text(text), dim=-1)
        return self.logit_scale.exp() * image @ text.t()


@theme.loss(TwoTowers, two_views, adds="no")
def clip_both_directions(model, batch):
    """CLIP: in-batch negatives, image to text and text to image."""
    logits = model(*batch)
    labels = torch.arange(logits.shape[0])
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


@theme.loss(TwoTowers, two_views)
def pairs_with_a_sigmoid(model, image, text):
    """Two towers, each pair scored by itself: no negatives from the batch."""
    a, b = model.image(image), model.text(text)
    return F.softplus(-(a * b).sum(-1) * model.logit_scale.exp()).mean()


@theme.loss(encoder, two_views, adds="no")
def nt_xent(model, batch):
    """SimCLR: two views concatenated, everything else in the batch is a negative."""
    z = F.normalize(model(torch.cat(batch)), dim=1)
    n = z.shape[0] // 2
    sim = z @ z.T / 0.5
    sim.fill_diagonal_(-1e9)
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(sim, target)


@theme.loss(encoder, two_views)
def views_concatenated_and_chunked(model, batch):
    """SimCLR's forward, but each view is only held against its own twin."""
    one, other = model(torch.cat(batch, dim=0)).chunk(2, dim=0)
    return F.mse_loss(one, other.detach())


class SimSiam(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = encoder()
        self.predictor = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8))

    def forward(self, one, other):
        z1, z2 = self.encoder(one), self.encoder(other)
        return self.predictor(z1), self.predictor(z2), z1.detach(), z2.detach()


@theme.loss(SimSiam, two_views)
def simsiam(model, batch):
    """Negative cosine similarity between the views of each sample, without BatchNorm."""
    p1, p2, z1, z2 = model(*batch)
    similarity = nn.CosineSimilarity(dim=1)
    return -(similarity(p1, z2).mean() + similarity(p2, z1).mean()) * 0.5


@theme.loss(encoder, two_views, adds="no")
def barlow_twins(model, batch):
    """The cross-correlation of two views over the batch becomes the identity."""
    a, b = (model(x) for x in batch)
    a = (a - a.mean(0)) / a.std(0)
    b = (b - b.mean(0)) / b.std(0)
    c = a.T @ b / len(a)
    on = (torch.diagonal(c) - 1).pow(2).sum()
    off = c.pow(2).sum() - torch.diagonal(c).pow(2).sum()
    return on + 0.005 * off


@theme.loss(encoder, two_views, adds="no")
def vicreg(model, batch):
    """Invariance of views, variance and covariance over the batch."""
    a, b = (model(x) for x in batch)
    total = 25.0 * F.mse_loss(a, b)
    for z in (a - a.mean(dim=0), b - b.mean(dim=0)):
        std = torch.sqrt(z.var(dim=0) + 1e-4)
        cov = (z.T @ z) / (z.shape[0] - 1)
        off = cov - torch.diag(torch.diag(cov))
        total = total + 25.0 * F.relu(1 - std).mean() + off.pow(2).sum() / z.shape[1]
    return total
