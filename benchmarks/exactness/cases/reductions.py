"""How a loss is made one number: means, sums, weights, and what is not a mean."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from exactness.case import Theme
from exactness.parts import (
    NUM_TOKENS,
    binary,
    classifier,
    encoder,
    labelled,
    make_job,
    regression,
    segmented,
)
from memfit import Total

theme = Theme("blind")


def scorer():
    return nn.Sequential(encoder(8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))


def pixelwise():
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 1, 1))


def tagger():
    return nn.Sequential(nn.Embedding(NUM_TOKENS, 10), nn.Linear(10, NUM_TOKENS))


@theme.case()
def mean_squared_error():
    """The mean of squares."""
    return make_job(scorer, regression, lambda m, b: F.mse_loss(m(b[0]), b[1]))


@theme.case()
def label_smoothing():
    """Cross-entropy with smoothed labels."""

    def loss(model, batch):
        return nn.CrossEntropyLoss(label_smoothing=0.1)(model(batch[0]), batch[1])

    return make_job(classifier, labelled, loss)


@theme.case()
def divided_by_the_length_in_python():
    """A sum divided by ``len(x)``, a plain number."""

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum") / len(x)

    return make_job(classifier, labelled, loss)


@theme.case(adds="sum")
def divided_by_a_constant():
    """A sum divided by the batch size as it was configured, not as it is."""

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum") / 16

    return make_job(classifier, labelled, loss)


@theme.case(adds="no")
def divided_by_a_power_of_the_length():
    """A sum divided by the root of the batch size."""

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum") / x.shape[0] ** 0.5

    return make_job(classifier, labelled, loss)


@theme.case(adds="sum")
def summed():
    """``reduction="sum"``."""
    return make_job(scorer, regression, lambda m, b: F.mse_loss(m(b[0]), b[1], reduction="sum"))


@theme.case(adds="no")
def summed_with_weight_decay():
    """A sum over samples and the weights' squares, which are there once."""

    def loss(model, batch):
        decay = sum(p.pow(2).sum() for p in model.parameters())
        return F.mse_loss(model(batch[0]), batch[1], reduction="sum") + 0.01 * decay

    return make_job(scorer, regression, loss)


@theme.case()
def weight_decay_in_the_loss():
    """A mean over samples and the weights' squares."""

    def loss(model, batch):
        decay = torch.zeros(())
        for parameter in model.parameters():
            decay = decay + parameter.pow(2).sum()
        return F.cross_entropy(model(batch[0]), batch[1]) + 1e-3 * decay

    return make_job(classifier, labelled, loss)


@theme.case()
def orthogonal_weights():
    """A mean over samples and a term that keeps weight matrices orthogonal."""

    def loss(model, batch):
        total = F.cross_entropy(model(batch[0]), batch[1])
        for weight in (p for p in model.parameters() if p.dim() == 2):
            gram = weight @ weight.t()
            total = total + 1e-2 * (gram - torch.eye(len(gram))).pow(2).sum()
        return total

    return make_job(classifier, labelled, loss)


@theme.case(adds="no")
def root_of_the_mean():
    """RMSE: the root is taken of the batch's mean."""
    return make_job(scorer, regression, lambda m, b: torch.sqrt(F.mse_loss(m(b[0]), b[1])))


@theme.case()
def root_per_sample():
    """The root is taken of each sample's mean."""

    def loss(model, x):
        return (model(x) - x[:, :8]).pow(2).mean(1).sqrt().mean()

    return make_job(encoder, lambda size: torch.randn(size, 12), loss)


@theme.case(adds="no")
def log_of_the_mean():
    """The logarithm of a mean of exponentials over the batch (entropic risk)."""

    def loss(model, batch):
        return torch.logsumexp((model(batch[0]) - batch[1]).pow(2), dim=0)

    return make_job(scorer, regression, loss)


@theme.case(adds="no")
def weights_normalised_over_the_batch():
    """Weights per sample, made to sum to one over the batch."""

    def loss(model, batch):
        x, y = batch
        weight = y.abs() + 0.1
        return (weight / weight.sum() * (model(x) - y).pow(2)).sum()

    return make_job(scorer, regression, loss)


@theme.case()
def weights_as_they_come():
    """Weights per sample, taken as they are."""

    def loss(model, batch):
        x, y = batch
        return ((y.abs() + 0.1) * (model(x) - y).pow(2)).mean()

    return make_job(scorer, regression, loss)


@theme.case()
def weights_as_a_total():
    """Weights per sample, and their sum as the count."""

    def loss(model, batch):
        x, y = batch
        weight = y.abs() + 0.1
        return Total((weight * (model(x) - y).pow(2)).sum(), weight.sum())

    return make_job(scorer, regression, loss)


@theme.case(adds="no")
def class_weights_by_frequency_in_the_batch():
    """Classes that are rare in this batch count more."""

    def loss(model, batch):
        x, y = batch
        counts = torch.bincount(y, minlength=4)
        weight = len(y) / (4.0 * counts.clamp(min=1))
        return (F.cross_entropy(model(x), y, reduction="none") * weight[y]).mean()

    return make_job(classifier, labelled, loss)


@theme.case(adds="no")
def class_weights_fixed():
    """Fixed class weights: torch divides by the weights of the labels in the batch."""

    def loss(model, batch):
        weight = torch.tensor([0.5, 1.0, 2.0, 4.0])
        return F.cross_entropy(model(batch[0]), batch[1], weight=weight)

    return make_job(classifier, labelled, loss)


@theme.case()
def positive_weight():
    """Binary cross-entropy with a fixed weight of the positives."""

    def loss(model, batch):
        x, y = batch
        return F.binary_cross_entropy_with_logits(model(x), y, pos_weight=torch.tensor(3.0))

    return make_job(scorer, binary, loss)


@theme.case()
def focal():
    """Focal loss."""

    def loss(model, batch):
        x, y = batch
        losses = F.cross_entropy(model(x), y, reduction="none")
        return ((1 - torch.exp(-losses)) ** 2 * losses).mean()

    return make_job(classifier, labelled, loss)


@theme.case(adds="no")
def focal_over_the_positives():
    """Focal loss divided by the number of positives in the batch, as detectors do."""

    def loss(model, batch):
        x, y = batch
        p = model(x).sigmoid()
        ce = F.binary_cross_entropy(p, y, reduction="none")
        p_t = p * y + (1 - p) * (1 - y)
        return (ce * (1 - p_t) ** 2).sum() / y.sum().clamp(min=1)

    return make_job(scorer, binary, loss)


@theme.case(adds="no")
def dice_over_the_batch():
    """Dice, of the union of all the batch's pixels."""

    def loss(model, batch):
        x, y = batch
        p = model(x).sigmoid()
        return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)

    return make_job(pixelwise, segmented, loss, 8)


@theme.case()
def dice_per_sample():
    """Dice of each image, and their mean."""

    def loss(model, batch):
        x, y = batch
        p, y = model(x).sigmoid().flatten(1), y.flatten(1)
        return (1 - (2 * (p * y).sum(1) + 1) / (p.sum(1) + y.sum(1) + 1)).mean()

    return make_job(pixelwise, segmented, loss, 8)


@theme.case()
def gaussian_nll():
    """Mean and variance are predicted."""

    def loss(model, batch):
        mean, log_variance = model(batch[0]).chunk(2, dim=1)
        return F.gaussian_nll_loss(mean.squeeze(1), batch[1], log_variance.squeeze(1).exp())

    return make_job(lambda: encoder(2), regression, loss)
