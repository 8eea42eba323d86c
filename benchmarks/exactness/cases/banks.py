"""Losses that compare samples with a queue, a bank, a teacher, centres or prototypes."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from exactness.case import Theme
from exactness.parts import encoder, labelled, make_job, two_views, vectors

theme = Theme("blind")


class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = encoder()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        for parameter in self.key.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)  # as after some steps
        self.register_buffer("queue", F.normalize(torch.randn(8, 32), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, keys):
        pointer = int(self.queue_ptr)
        self.queue[:, pointer : pointer + keys.shape[0]] = keys.T
        self.queue_ptr[0] = (pointer + keys.shape[0]) % self.queue.shape[1]

    def forward(self, one, other):
        q = F.normalize(self.query(one), dim=1)
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.mul_(0.99).add_(fast, alpha=0.01)
            k = F.normalize(self.key(other), dim=1)
        positive = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        self.enqueue(k)
        return torch.cat([positive, negative], dim=1) / 0.07


@theme.loss(MoCo, two_views, adds="no", leaves="different")
def moco_queue(model, batch):
    """MoCo: a queue of earlier keys, and a slow encoder that moves in forward."""
    logits = model(*batch)
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


class Byol(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = encoder()
        self.predictor = nn.Linear(8, 8)
        self.target = encoder()
        for parameter in self.target.parameters():
            parameter.requires_grad = False

    def forward(self, one, other):
        with torch.no_grad():
            for t, o in zip(self.target.parameters(), self.online.parameters(), strict=True):
                t.data.mul_(0.9).add_(o.data, alpha=0.1)
            target = self.target(other)
        return self.predictor(self.online(one)), target


@theme.loss(Byol, two_views, adds="no", leaves="different")
def ema_teacher_moved_in_forward(model, batch):
    """BYOL whose teacher moves at each forward: later pieces meet another teacher."""
    prediction, target = model(*batch)
    return 2 - 2 * F.cosine_similarity(prediction, target, dim=-1).mean()


@theme.loss(encoder, lambda size: (torch.randn(size, 12), torch.randn(size, 12) + 1), adds="no")
def mmd(model, batch):
    """Maximum mean discrepancy between two samples in the batch, with a Gaussian kernel."""
    a, b = (model(x) for x in batch)

    def kernel(p, q):
        return torch.exp(-torch.cdist(p, q).pow(2) / 8).mean()

    return kernel(a, a) + kernel(b, b) - 2 * kernel(a, b) + 0.1 * F.mse_loss(a, b)


@theme.loss(encoder, two_views, adds="no")
def sinkhorn_over_the_batch(model, batch):
    """SwAV: assignments are balanced over the batch by Sinkhorn's iterations."""
    one, other = (model(x) for x in batch)
    with torch.no_grad():
        q = torch.exp(other / 0.5).t()
        q = q / q.sum()
        for _ in range(3):
            q = q / q.sum(dim=1, keepdim=True) / q.shape[0]
            q = q / q.sum(dim=0, keepdim=True) / q.shape[1]
        q = (q * q.shape[1]).t()
    return -(q * F.log_softmax(one / 0.1, dim=1)).sum(dim=1).mean()


class Prototypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = encoder()
        self.prototypes = nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        return torch.cdist(self.encoder(x), self.prototypes)


@theme.loss(Prototypes, labelled)
def distances_to_prototypes(model, x, y):
    """Each sample's distances to learned prototypes, as its scores."""
    return F.cross_entropy(-model(x), y)


@theme.loss(encoder, vectors, adds="no")
def distances_within_the_batch(model, x):
    """Pairwise distances of inputs are kept by the features (stress)."""
    return (torch.cdist(model(x), model(x)) - torch.cdist(x, x)).square().mean()


class MemoryBank(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = encoder()
        self.register_buffer("bank", F.normalize(torch.randn(64, 8), dim=1))

    def forward(self, x, index):
        z = F.normalize(self.encoder(x), dim=1)
        logits = z @ self.bank.clone().T / 0.2
        with torch.no_grad():
            updated = F.normalize(0.5 * self.bank[index] + 0.5 * z, dim=1)
            self.bank.index_copy_(0, index, updated)
        return logits


@theme.loss(
    MemoryBank,
    lambda size: (torch.randn(size, 12), torch.arange(size) * 3),
    adds="no",
    effects=True,
)
def memory_bank(model, x, index):
    """Instance discrimination: each sample has a row in a bank, renewed in forward."""
    return F.cross_entropy(model(x, index), index)


@theme.loss(MemoryBank, lambda size: (torch.randn(size, 12), torch.arange(size) * 3))
def frozen_memory_bank(model, x, index):
    """The same, with a bank that nobody writes during the step."""
    z = F.normalize(model.encoder(x), dim=1)
    return F.cross_entropy(z @ model.bank.T / 0.2, index)


class CentreLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = encoder(), nn.Linear(8, 4)
        self.register_buffer("centres", torch.zeros(4, 8))

    def forward(self, x, y):
        z = self.encoder(x)
        with torch.no_grad():
            for label in range(4):
                members = (y == label).unsqueeze(1).to(z.dtype)
                gap = (members * (self.centres[label] - z)).sum(0) / (1 + members.sum())
                self.centres[label] -= 0.5 * gap
        pull = (z - self.centres[y]).pow(2).sum(1).mean()
        return F.cross_entropy(self.head(z), y) + 0.01 * pull


@theme.case(adds="no", leaves="different")
def centre_loss_updated_in_forward():
    """Centre loss whose centres move towards the batch's means in forward."""
    return make_job(CentreLoss, labelled, lambda model, batch: model(*batch))


class ArcFace(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = encoder()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, x, y):
        cosine = F.linear(F.normalize(self.encoder(x)), F.normalize(self.weight))
        sine = torch.sqrt((1.0 - cosine.pow(2)).clamp(1e-6, 1))
        phi = cosine * 0.8776 - sine * 0.4794
        phi = torch.where(cosine > -0.8776, phi, cosine - 0.24)
        one_hot = torch.zeros_like(cosine).scatter_(1, y.view(-1, 1), 1)
        return 16 * (one_hot * phi + (1 - one_hot) * cosine)


@theme.loss(ArcFace, labelled)
def arcface(model, batch):
    """ArcFace: an angular margin on the true class of each sample."""
    return F.cross_entropy(model(*batch), batch[1])


@theme.loss(encoder, labelled, adds="groups")
def pairs_as_neighbours(model, x, y):
    """A loader that puts pairs beside each other; even rows meet odd rows."""
    z = model(x)
    distance = (z[0::2] - z[1::2]).pow(2).sum(1)
    same = (y[0::2] == y[1::2]).to(z.dtype)
    return (same * distance + (1 - same) * F.relu(1 - distance.sqrt()).pow(2)).mean()
