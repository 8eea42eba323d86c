"""Metric learning and self-supervision, as public libraries compute them."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from exactness.case import Theme
from exactness.parts import encoder, labelled, make_job, two_views

theme = Theme("public")


@theme.loss(
    encoder,
    labelled,
    adds="no",
    source="KevinMusgrave/pytorch-metric-learning losses/multi_similarity_loss.py",
)
def multi_similarity(model, x, y):
    """Soft sums over the positives and the negatives of each anchor in the batch."""
    z = F.normalize(model(x), dim=1)
    similarity = z @ z.T - 0.5
    same = y[:, None] == y[None, :]
    other = ~same
    same = same & ~torch.eye(len(y), dtype=torch.bool)
    pull = (torch.exp(-2.0 * similarity) * same).sum(1).log1p() / 2.0
    push = (torch.exp(10.0 * similarity) * other).sum(1).log1p() / 10.0
    return (pull + push).mean()


class ProxyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = encoder()
        self.proxies = nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        return F.normalize(self.encoder(x), dim=1) @ F.normalize(self.proxies, dim=1).T


@theme.loss(
    ProxyModel,
    labelled,
    adds="no",
    source="KevinMusgrave/pytorch-metric-learning losses/proxy_anchor_loss.py",
)
def proxy_anchor(model, batch):
    """Soft sums over the batch for each proxy, divided by the classes that are present."""
    cosine, y = model(batch[0]), batch[1]
    own = F.one_hot(y, 4).to(cosine.dtype)
    present = torch.nonzero(own.sum(0)).squeeze(1)
    positive = (own * torch.exp(-8 * (cosine - 0.1))).sum(0).log1p()
    negative = ((1 - own) * torch.exp(8 * (cosine + 0.1))).sum(0).log1p()
    return positive.sum() / len(present) + negative.sum() / 4


@theme.loss(
    ProxyModel,
    labelled,
    source="KevinMusgrave/pytorch-metric-learning docs/losses.md (proxy losses)",
)
def proxy_nca(model, x, y):
    """Each sample against all proxies: its own is pulled, the others are pushed."""
    return F.cross_entropy(8 * model(x), y)


class CrossBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = encoder()
        self.memory, self.labels = torch.zeros(64, 8), torch.zeros(64, dtype=torch.long)
        self.next, self.is_full = 0, False

    def forward(self, x, y):
        z = F.normalize(self.encoder(x), dim=1)
        places = (self.next + torch.arange(len(x))) % 64
        self.memory[places] = z.detach().to(self.memory.dtype)
        self.labels[places] = y
        self.next += len(x)
        distance = torch.cdist(z, self.memory[: self.next].to(z.dtype))
        same = y[:, None] == self.labels[None, : self.next]
        return torch.where(same, distance.pow(2), F.relu(1 - distance).pow(2)).mean()


@theme.case(
    adds="no",
    effects=True,
    source="KevinMusgrave/pytorch-metric-learning losses/cross_batch_memory.py",
)
def cross_batch_memory():
    """Embeddings are held against those of earlier batches, in plain attributes of the loss."""
    return make_job(CrossBatch, labelled, lambda model, batch: model(*batch))


@theme.loss(
    encoder,
    lambda size: (torch.randn(size, 2, 12), labelled(size)[1]),
    adds="no",
    source="HobbitLong/SupContrast losses.py",
)
def supervised_contrastive_of_views(model, views, y):
    """Two views per sample as a dimension; all of both views are each other's negatives."""
    features = F.normalize(model(views), dim=-1)
    contrast = torch.cat(torch.unbind(features, dim=1), dim=0)
    logits = contrast @ contrast.T / 0.2
    logits = logits - logits.max(dim=1, keepdim=True).values.detach()
    mask = torch.eq(y.view(-1, 1), y.view(1, -1)).to(logits.dtype).repeat(2, 2)
    others = torch.ones_like(mask).scatter(1, torch.arange(len(mask)).view(-1, 1), 0)
    log_prob = logits - ((logits.exp() * others).sum(1, keepdim=True) + 1e-9).log()
    mask = mask * others
    return -((mask * log_prob).sum(1) / mask.sum(1)).view(2, len(y)).mean()


@theme.case(adds="no", source="lightly-ai/lightly lightly/loss/tico_loss.py")
def tico():
    """A covariance of the batch is mixed into a moving one, which weighs each sample."""
    moving = {"covariance": torch.zeros(8, 8)}

    def loss(model, batch):
        a, b = (model(x) for x in batch)
        a = F.normalize(a - a.mean(0), dim=-1)
        b = F.normalize(b - b.mean(0), dim=-1)
        covariance = 0.9 * moving["covariance"].to(a.dtype) + 0.1 * (a.T @ a / len(a))
        return 1 - (a * b).sum(1).mean() + 8.0 * ((a @ covariance) * a).sum(1).mean()

    return make_job(encoder, two_views, loss)


class Dino(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = encoder()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, 8))

    def forward(self, crops):
        student = self.student(torch.cat(crops)) / 0.1
        with torch.no_grad():
            teacher = self.teacher(torch.cat(crops[:2]))
        targets = F.softmax((teacher - self.center) / 0.07, dim=-1).chunk(2)
        total, count = 0.0, 0
        for i, target in enumerate(targets):
            for j, view in enumerate(student.chunk(len(crops))):
                if i != j:
                    total = total - (target * F.log_softmax(view, dim=-1)).sum(-1).mean()
                    count += 1
        self.center = 0.9 * self.center + 0.1 * teacher.mean(0, keepdim=True)
        return total / count


def crops(size):
    x = torch.randn(size, 12)
    return [x + 0.3 * torch.randn(size, 12) for _ in range(4)]


@theme.case(adds="no", leaves="different", source="facebookresearch/dino main_dino.py")
def dino_with_a_moving_centre():
    """Four crops; the teacher's centre moves at the end of each forward and is used in the next."""
    return make_job(Dino, crops, lambda model, batch: model(batch))


@theme.loss(
    encoder,
    two_views,
    adds="no",
    source="wvangansbeke/Unsupervised-Classification losses/losses.py",
)
def scan_clustering(model, batch):
    """Neighbours agree; the entropy of the batch's mean assignment is large."""
    one, other = (model(x).softmax(1) for x in batch)
    similarity = torch.bmm(one.unsqueeze(1), other.unsqueeze(2)).flatten()
    mean = one.mean(0).clamp(min=1e-8)
    return -similarity.log().mean() + 2.0 * (mean * mean.log()).sum()


class AdaFace(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = encoder()
        self.kernel = nn.Parameter(torch.randn(8, 4))
        self.register_buffer("batch_mean", torch.full((1,), 2.0))
        self.register_buffer("batch_std", torch.ones(1))

    def forward(self, x, y):
        z = self.encoder(x)
        norms = z.norm(dim=1, keepdim=True)
        cosine = (z / norms) @ F.normalize(self.kernel, dim=0)
        quality = norms.detach().clamp(0.001, 100)
        with torch.no_grad():
            self.batch_mean = 0.5 * quality.mean() + 0.5 * self.batch_mean
            self.batch_std = 0.5 * quality.std() + 0.5 * self.batch_std
        margin = ((quality - self.batch_mean) / (self.batch_std + 1e-3) * 0.33).clamp(-1, 1)
        own = F.one_hot(y, 4).to(z.dtype)
        angle = cosine.clamp(-0.999, 0.999).acos() - own * 0.4 * margin
        return 8 * (angle.clamp(1e-3, 3.14).cos() - own * (0.4 + 0.4 * margin))


@theme.case(adds="no", leaves="different", source="mk-minchul/AdaFace head.py")
def adaface():
    """A margin by each sample's feature norm, against a moving mean and deviation of the batch."""
    return make_job(AdaFace, labelled, lambda m, b: F.cross_entropy(m(*b), b[1]))


class CurricularFace(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = encoder()
        self.kernel = nn.Parameter(torch.randn(8, 4))
        self.register_buffer("t", torch.zeros(1))

    def forward(self, x, y):
        cosine = F.normalize(self.encoder(x), dim=1) @ F.normalize(self.kernel, dim=0)
        own = cosine[torch.arange(len(y)), y].view(-1, 1)
        moved = own * 0.88 - torch.sqrt((1 - own**2).clamp(min=1e-6)) * 0.48
        hard = cosine > moved
        with torch.no_grad():
            self.t = own.mean() * 0.01 + 0.99 * self.t
        weighed = torch.where(hard, cosine * (self.t + cosine), cosine)
        return 8 * weighed.scatter(1, y.view(-1, 1), moved)


@theme.case(adds="no", leaves="different", source="HuangYG123/CurricularFace head/metrics.py")
def curricular_face():
    """Hard negatives are weighed by a moving mean of the batch's cosine with its own classes."""
    return make_job(CurricularFace, labelled, lambda m, b: F.cross_entropy(m(*b), b[1]))


@theme.loss(
    encoder,
    labelled,
    adds="no",
    source="KaiyangZhou/deep-person-reid torchreid/losses/hard_mine_triplet_loss.py",
)
def hard_mine_triplet_in_a_loop(model, x, y):
    """Hardest positive and negative of each anchor, picked in a loop with boolean masks."""
    z = model(x)
    squares = z.pow(2).sum(1, keepdim=True)
    distance = (squares + squares.T - 2 * z @ z.T).clamp(min=1e-12).sqrt()
    same = y[:, None].eq(y[None, :])
    farthest = torch.stack([distance[i][same[i]].max() for i in range(len(y))])
    nearest = torch.stack(
        [
            distance[i][~same[i]].min() if bool((~same[i]).any()) else distance[i].max()
            for i in range(len(y))
        ]
    )
    return nn.MarginRankingLoss(margin=0.3)(nearest, farthest, torch.ones_like(nearest))


@theme.loss(encoder, two_views, source="wvangansbeke/Unsupervised-Classification losses/losses.py")
def consistency_of_confident_samples(model, weak, strong):
    """Pseudo-labels of a weak view teach the strong one; unsure samples count zero."""
    confidence, label = model(weak).detach().softmax(1).max(1)
    losses = F.cross_entropy(model(strong), label, reduction="none")
    return (losses * (confidence > 0.2)).mean()


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = encoder(), encoder()
        self.caption = nn.Linear(8, 11)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.labels, self.num_logits = None, 0

    def contrast(self, image, text):
        logits = self.logit_scale.exp() * F.normalize(image, dim=-1) @ F.normalize(text, dim=-1).T
        if self.num_logits != len(logits):
            self.labels, self.num_logits = torch.arange(len(logits)), len(logits)
        both = F.cross_entropy(logits, self.labels) + F.cross_entropy(logits.T, self.labels)
        return both / 2


@theme.loss(
    Towers,
    two_views,
    adds="no",
    leaves="different",
    source="mlfoundations/open_clip src/open_clip/loss.py",
)
def clip_that_keeps_its_labels(model, batch):
    """CLIP's loss that keeps its labels in an attribute while the batch is of one size."""
    return model.contrast(model.image(batch[0]), model.text(batch[1]))


@theme.loss(
    Towers,
    lambda size: (torch.randn(size, 12), torch.randint(1, 11, (size, 5))),
    source="mlfoundations/open_clip src/open_clip/loss.py (CoCa's caption term)",
)
def captions_only(model, x, caption):
    """CoCa's caption term alone, with captions of one length."""
    logits = model.caption(model.image(x))[:, :, None].expand(-1, -1, 5)
    return 2.0 * F.cross_entropy(logits, caption, ignore_index=0)
