"""Mining, ranking, and order statistics: within a sample, and over the batch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from exactness.case import Theme
from exactness.parts import (
    classifier,
    encoder,
    images,
    labelled,
    make_job,
    regression,
    scorer,
    segmented,
    vectors,
)

theme = Theme("blind")


def pixelwise():
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 1, 3, padding=1))


@theme.loss(classifier, labelled, adds="no")
def hard_examples_topk(model, x, y):
    """Only the four hardest samples of the batch count."""
    losses = F.cross_entropy(model(x), y, reduction="none")
    return losses.topk(min(4, len(losses))).values.mean()


@theme.loss(classifier, labelled, adds="no")
def hard_examples_by_share(model, x, y):
    """The hardest quarter of the batch counts."""
    losses = F.cross_entropy(model(x), y, reduction="none")
    keep = max(1, int(0.25 * len(losses)))
    return losses.sort(descending=True).values[:keep].mean()


@theme.loss(pixelwise, segmented, 8, adds="no")
def ohem_over_pixels(model, x, y):
    """Online hard example mining over all pixels of the batch."""
    losses = F.binary_cross_entropy_with_logits(model(x), y, reduction="none").flatten()
    return losses.topk(losses.numel() // 4).values.mean()


@theme.loss(pixelwise, segmented, 8, adds="no")
def ohem_by_a_threshold(model, x, y):
    """Pixels above the loss of the k-th hardest count, picked with a mask."""
    losses = F.binary_cross_entropy_with_logits(model(x), y, reduction="none").view(-1)
    ordered, _ = torch.sort(losses, descending=True)
    threshold = ordered[min(100, len(ordered) - 1)]
    return losses[losses > threshold].mean()


@theme.loss(pixelwise, segmented, 8)
def ohem_within_each_image(model, x, y):
    """The hardest quarter of each image's own pixels counts."""
    losses = F.binary_cross_entropy_with_logits(model(x), y, reduction="none").flatten(1)
    return losses.topk(losses.shape[1] // 4, dim=1).values.mean()


@theme.loss(classifier, labelled, adds="no")
def variance_term_beyond_a_length(model, x, y):
    """A variance term over the batch that only larger batches have."""
    z = model(x)
    total = F.cross_entropy(z, y)
    if len(x) > 8:
        total = total + 0.1 * F.relu(1 - z.std(dim=0)).mean()
    return total


@theme.loss(encoder, vectors, adds="no")
def neighbours_by_roll(model, x):
    """Each sample is held against the next one in the batch."""
    z = model(x)
    return (z - x[:, :8]).square().mean() - 0.1 * (z - z.roll(1, 0)).square().mean()


@theme.loss(encoder, lambda size: torch.randn(size, 5, 12))
def neighbours_in_time_by_roll(model, x):
    """The same between neighbours in time, within each sample."""
    z = model(x)
    return z.square().mean() + 0.1 * (z - z.roll(1, 1)).square().mean()


@theme.loss(scorer, regression, adds="no")
def max_over_the_batch(model, x, y):
    """The worst sample alone counts."""
    return (model(x) - y).abs().max()


@theme.loss(scorer, regression, adds="no")
def pairwise_ranking(model, x, y):
    """RankNet over all pairs of the batch."""
    s = model(x)
    higher = (y[:, None] > y[None, :]).to(s.dtype)
    return (higher * F.softplus(-(s[:, None] - s[None, :]))).sum() / higher.sum()


@theme.case()
def bayesian_personalised_ranking():
    """BPR: one positive and one negative item per user, from the loader."""

    class Factors(nn.Module):
        def __init__(self):
            super().__init__()
            self.users, self.items = nn.Embedding(20, 6), nn.Embedding(30, 6)

        def forward(self, user, item):
            return (self.users(user) * self.items(item)).sum(-1)

    def batch(size):
        return tuple(torch.randint(0, n, (size,)) for n in (20, 30, 30))

    def loss(model, batch):
        user, positive, negative = batch
        return -F.logsigmoid(model(user, positive) - model(user, negative)).mean()

    return make_job(Factors, batch, loss)


@theme.loss(scorer, regression, adds="groups")
def listnet_over_groups_in_the_batch(model, x, y):
    """ListNet over queries of four documents, which lie beside each other in the batch."""
    scores, gains = model(x).view(-1, 4), y.view(-1, 4)
    return -(gains.softmax(1) * scores.log_softmax(1)).sum(1).mean()


@theme.loss(scorer, lambda size: (*regression(size), torch.arange(size) % 4), adds="no")
def listnet_over_group_numbers(model, x, y, group):
    """ListNet over queries by number; the documents of a query lie anywhere."""
    scores = model(x)
    members = F.one_hot(group, 4).to(scores.dtype)
    normaliser = torch.log((members * scores.exp()[:, None]).sum(0))
    gains = y.exp() / (members * y.exp()[:, None]).sum(0)[group]
    return -(gains * (scores - normaliser[group])).sum() / 4


@theme.loss(lambda: encoder(1), lambda size: (torch.randn(size, 5, 12), torch.rand(size, 5)))
def listnet_one_list_per_sample(model, x, y):
    """ListNet where each sample is a whole list."""
    return -(y.softmax(-1) * F.log_softmax(model(x).squeeze(-1), -1)).sum(-1).mean()


@theme.loss(lambda: encoder(1), lambda size: (torch.randn(size, 6, 12), torch.randn(size, 6)))
def sort_within_a_sample(model, x, y):
    """Sliced Wasserstein distance between the points of each sample and of its target."""
    return (model(x).squeeze(-1).sort(dim=1).values - y.sort(dim=1).values).pow(2).mean()


@theme.loss(scorer, regression, adds="no")
def sort_over_the_batch(model, x, y):
    """Sliced Wasserstein distance between the batch's outputs and its targets."""
    return (model(x).sort(dim=0).values - y.sort(dim=0).values).pow(2).mean()


@theme.loss(lambda: encoder(1), lambda size: torch.randn(size, 6, 12))
def cumsum_over_time(model, x):
    """Discounted sums along each sample's own time."""
    steps = model(x).squeeze(-1)
    return (torch.cumsum(steps, dim=1) - torch.cumsum(x.mean(-1), dim=1)).pow(2).mean()


@theme.loss(
    scorer, lambda size: (torch.randn(size, 12), (torch.arange(size) % 3 > 0).float()), adds="no"
)
def cumsum_over_the_batch(model, x, observed):
    """Cox's partial likelihood: the batch is sorted by time, risks are summed along it."""
    risk = model(x)
    return -((risk - torch.logcumsumexp(risk, dim=0)) * observed).mean()


@theme.loss(lambda: encoder(3), regression)
def quantile_loss(model, x, y):
    """Pinball loss for three quantiles."""
    levels = torch.tensor([0.1, 0.5, 0.9])
    gap = y[:, None] - model(x)
    return torch.maximum(levels * gap, (levels - 1) * gap).sum(1).mean()


@theme.loss(scorer, regression, adds="no")
def trimmed_by_a_quantile_of_the_batch(model, x, y):
    """Samples beyond the batch's 80 % quantile are masked out."""
    losses = (model(x) - y).pow(2)
    kept = losses <= torch.quantile(losses.detach(), 0.8)
    return (losses * kept).mean()


@theme.loss(pixelwise, images, 8)
def total_variation(model, x):
    """Neighbouring pixels within each image."""
    y = model(x)
    across = (y[..., 1:] - y[..., :-1]).abs().mean()
    return F.mse_loss(y, x[:, :1]) + 0.1 * (across + (y[:, :, 1:] - y[:, :, :-1]).abs().mean())
