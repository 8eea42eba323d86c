"""Index tricks, masks and reshapes that keep samples apart, and some that do not."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from exactness.case import Theme
from exactness.parts import binary, classifier, encoder, labelled, make_job, tokens, vectors

theme = Theme("blind")


def sequences(size):
    return torch.randn(size, 5, 12), torch.randint(0, 4, (size, 5))


@theme.loss(classifier, labelled)
def picked_by_arange(model, x, y):
    """``logp[torch.arange(B), y]``."""
    logp = F.log_softmax(model(x), dim=-1)
    return -logp[torch.arange(len(y)), y].mean()


@theme.loss(classifier, labelled)
def picked_by_gather(model, x, action):
    """Q-learning: the taken action's value is gathered."""
    q = model(x).gather(1, action.unsqueeze(1)).squeeze(1)
    return F.smooth_l1_loss(q, x.mean(1))


@theme.loss(classifier, labelled)
def picked_by_one_hot(model, x, y):
    """One-hot labels times log-probabilities."""
    target = F.one_hot(y, num_classes=4).to(x.dtype)
    return -(target * F.log_softmax(model(x), -1)).sum(-1).mean()


@theme.loss(classifier, labelled)
def scattered_targets(model, x, y):
    """Soft targets written with scatter."""
    target = torch.full((len(x), 4), 0.05).scatter_(1, y[:, None], 0.85)
    return F.kl_div(F.log_softmax(model(x), -1), target, reduction="batchmean")


@theme.loss(encoder, vectors)
def masked_by_where(model, x):
    """Huber by hand."""
    gap = (model(x) - x[:, :8]).abs()
    return torch.where(gap < 0.5, gap.pow(2), gap - 0.25).mean()


@theme.loss(classifier, labelled)
def masked_fill_of_illegal_actions(model, x, y):
    """Illegal actions get a large negative score."""
    illegal = (x[:, :4] > 0.5) & ~F.one_hot(y, 4).bool()
    return F.cross_entropy(model(x).masked_fill(illegal, -1e9), y)


@theme.loss(classifier, sequences)
def flattened_over_time(model, x, y):
    """``view(B * T, D)`` and back again."""
    b, t, d = x.shape
    logits = model(x.view(b * t, d)).view(b, t, -1)
    return F.cross_entropy(logits.permute(0, 2, 1), y)


@theme.loss(classifier, sequences)
def flattened_for_good(model, x, y):
    """``reshape(-1, C)`` of scores and labels."""
    return F.cross_entropy(model(x).reshape(-1, 4), y.reshape(-1))


@theme.loss(classifier, sequences, adds="no")
def flattened_across_samples(model, x, y):
    """Samples are folded into one long sequence, and neighbours meet over its seams."""
    logits = model(x).reshape(-1, 4)
    smooth = (logits[1:] - logits[:-1]).pow(2).sum() / x.shape[0]
    return F.cross_entropy(logits, y.reshape(-1)) + 0.1 * smooth


@theme.loss(classifier, sequences)
def time_first(model, x, y):
    """Time before the batch, the batch transposed for the loss."""
    logits = model(x.transpose(0, 1))
    return sum(F.cross_entropy(step, y[:, t]) for t, step in enumerate(logits)) / len(logits)


@theme.case()
def einsum_bilinear():
    """A bilinear score by einsum."""

    class Bilinear(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.weight = encoder(), nn.Parameter(torch.randn(8, 12) * 0.1)

        def forward(self, x):
            return torch.einsum("bi,ij,bj->b", self.encoder(x), self.weight, x)

    return make_job(Bilinear, vectors, lambda m, x: F.softplus(-m(x)).mean())


@theme.loss(encoder, vectors, adds="no")
def einsum_covariance(model, x):
    """A covariance over the batch by einsum."""
    z = model(x)
    c = torch.einsum("bi,bj->ij", z, z) / len(x)
    return (c - torch.eye(8)).pow(2).mean()


@theme.loss(encoder, lambda size: torch.randn(size, 5, 12))
def einsum_covariance_per_sample(model, x):
    """Gram matrices of each sample's own features (style loss)."""
    z = model(x)
    gram = torch.einsum("bti,btj->bij", z, z) / z.shape[1]
    return (gram - torch.eye(8)).pow(2).mean()


@theme.loss(encoder, vectors)
def cosine_similarity_to_targets(model, x):
    """Cosine embedding loss with targets of each sample."""
    return (1 - F.cosine_similarity(model(x), x[:, :8])).mean()


@theme.loss(encoder, binary)
def masked_rows_summed_over_all(model, x, y):
    """Rows picked with a boolean mask, but divided by the whole batch's length."""
    chosen = y > 0
    return model(x[chosen]).pow(2).sum() / len(x)


@theme.loss(encoder, binary, adds="no")
def masked_rows_meaned(model, x, y):
    """The mean over the rows that a boolean mask picks."""
    z = model(x)
    return z[y > 0].pow(2).mean() + (z[y == 0] - 1).pow(2).mean()


@theme.loss(classifier, labelled)
def loop_over_samples(model, x, y):
    """A Python loop over the samples, stacked again."""
    losses = [F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]) for i in range(len(x))]
    return torch.stack(losses).mean()


def with_a_prior(size):
    x, y = labelled(size)
    return {"x": x, "y": y, "prior": torch.tensor([0.4, 0.3, 0.2, 0.1])}


@theme.loss(classifier, with_a_prior)
def dictionary_batch(model, batch):
    """A batch that is a dictionary with a tensor that belongs to no sample."""
    return F.cross_entropy(model(batch["x"]) + batch["prior"].log(), batch["y"])


@theme.loss(classifier, labelled, adds="no")
def centred_by_the_batch(model, x, y):
    """Inputs lose the batch's mean."""
    return F.cross_entropy(model(x - x.mean(dim=0, keepdim=True)), y)


@theme.loss(classifier, labelled)
def centred_by_each_sample(model, x, y):
    """Inputs lose their own mean."""
    return F.cross_entropy(model(x - x.mean(dim=1, keepdim=True)), y)


@theme.loss(encoder, vectors, adds="no")
def first_sample_is_the_reference(model, x):
    """Everything is held against the first sample of the batch."""
    z = model(x)
    return (z - z[:1]).pow(2).mean()


@theme.loss(encoder, vectors, adds="no")
def broadcast_by_mistake(model, x):
    """``(B, 1)`` minus ``(B,)``: every output meets every target."""
    return (model(x)[:, :1] - x[:, 0]).pow(2).mean()


@theme.loss(lambda: nn.Embedding(11, 8), tokens)
def packed_by_index_add(model, ids):
    """Token vectors are added up per sequence by its number in the batch."""
    b, t = ids.shape
    owner = torch.arange(b).repeat_interleave(t)
    flat = model(ids.reshape(-1))
    bags = torch.zeros(b, flat.shape[1]).index_add(0, owner, flat)
    return bags.pow(2).mean()


@theme.loss(encoder, vectors, adds="no")
def permuted_twins(model, x):
    """Each sample is held against the batch in reverse order."""
    z = model(x)
    return (z * z.flip(0)).sum(1).mean() + z.pow(2).mean()
