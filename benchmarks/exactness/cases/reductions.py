"""How a loss is made one number: means, sums, weights, and what is not a mean."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from exactness.case import Theme
from exactness.parts import (
    binary,
    classifier,
    encoder,
    labelled,
    make_job,
    regression,
    scorer,
    segmented,
)
from memfit import Total

theme = Theme("blind")


def pixelwise():
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 1, 1))


@theme.case()
def mean_squared_error():
    """The mean of squares."""
    return make_job(scorer, regression, lambda m, b: F.mse_loss(m(b[0]), b[1]))


@theme.loss(classifier, labelled)
def label_smoothing(model, batch):
    """Cross-entropy with smoothed labels."""
    return nn.CrossEntropyLoss(label_smoothing=0.1)(model(batch[0]), batch[1])


@theme.loss(classifier, labelled)
def divided_by_the_length_in_python(model, x, y):
    """A sum divided by ``len(x)``, a plain number."""
    return F.cross_entropy(model(x), y, reduction="sum") / len(x)


@theme.loss(classifier, labelled, adds="sum")
def divided_by_a_constant(model, x, y):
    """A sum divided by the batch size as it was configured, not as it is."""
    return F.cross_entropy(model(x), y, reduction="sum") / 16


@theme.loss(classifier, labelled, adds="no")
def divided_by_a_power_of_the_length(model, x, y):
    """A sum divided by the root of the batch size."""
    return F.cross_entropy(model(x), y, reduction="sum") / x.shape[0] ** 0.5


@theme.case(adds="sum")
def summed():
    """``reduction="sum"``."""
    return make_job(scorer, regression, lambda m, b: F.mse_loss(m(b[0]), b[1], reduction="sum"))


@theme.loss(scorer, regression, adds="no")
def summed_with_weight_decay(model, batch):
    """A sum over samples and the weights' squares, which are there once."""
    decay = sum(p.pow(2).sum() for p in model.parameters())
    return F.mse_loss(model(batch[0]), batch[1], reduction="sum") + 0.01 * decay


@theme.loss(classifier, labelled)
def weight_decay_in_the_loss(model, batch):
    """A mean over samples and the weights' squares."""
    decay = torch.zeros(())
    for parameter in model.parameters():
        decay = decay + parameter.pow(2).sum()
    return F.cross_entropy(model(batch[0]), batch[1]) + 1e-3 * decay


@theme.loss(classifier, labelled)
def orthogonal_weights(model, batch):
    """A mean over samples and a term that keeps weight matrices orthogonal."""
    total = F.cross_entropy(model(batch[0]), batch[1])
    for weight in (p for p in model.parameters() if p.dim() == 2):
        gram = weight @ weight.t()
        total = total + 1e-2 * (gram - torch.eye(len(gram))).pow(2).sum()
    return total


@theme.case(adds="no")
def root_of_the_mean():
    """RMSE: the root is taken of the batch's mean."""
    return make_job(scorer, regression, lambda m, b: torch.sqrt(F.mse_loss(m(b[0]), b[1])))


@theme.loss(encoder, lambda size: torch.randn(size, 12))
def root_per_sample(model, x):
    """The root is taken of each sample's mean."""
    return (model(x) - x[:, :8]).pow(2).mean(1).sqrt().mean()


@theme.loss(scorer, regression, adds="no")
def log_of_the_mean(model, batch):
    """The logarithm of a mean of exponentials over the batch (entropic risk)."""
    return torch.logsumexp((model(batch[0]) - batch[1]).pow(2), dim=0)


@theme.loss(scorer, regression, adds="no")
def weights_normalised_over_the_batch(model, x, y):
    """Weights per sample, made to sum to one over the batch."""
    weight = y.abs() + 0.1
    return (weight / weight.sum() * (model(x) - y).pow(2)).sum()


@theme.loss(scorer, regression)
def weights_as_they_come(model, x, y):
    """Weights per sample, taken as they are."""
    return ((y.abs() + 0.1) * (model(x) - y).pow(2)).mean()


@theme.loss(scorer, regression)
def weights_as_a_total(model, x, y):
    """Weights per sample, and their sum as the count."""
    weight = y.abs() + 0.1
    return Total((weight * (model(x) - y).pow(2)).sum(), weight.sum())


@theme.loss(classifier, labelled, adds="no")
def class_weights_by_frequency_in_the_batch(model, x, y):
    """Classes that are rare in this batch count more."""
    counts = torch.bincount(y, minlength=4)
    weight = len(y) / (4.0 * counts.clamp(min=1))
    return (F.cross_entropy(model(x), y, reduction="none") * weight[y]).mean()


@theme.loss(classifier, labelled, adds="no")
def class_weights_fixed(model, batch):
    """Fixed class weights: torch divides by the weights of the labels in the batch."""
    weight = torch.tensor([0.5, 1.0, 2.0, 4.0])
    return F.cross_entropy(model(batch[0]), batch[1], weight=weight)


@theme.loss(scorer, binary)
def positive_weight(model, x, y):
    """Binary cross-entropy with a fixed weight of the positives."""
    return F.binary_cross_entropy_with_logits(model(x), y, pos_weight=torch.tensor(3.0))


@theme.loss(classifier, labelled)
def focal(model, x, y):
    """Focal loss."""
    losses = F.cross_entropy(model(x), y, reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


@theme.loss(scorer, binary, adds="no")
def focal_over_the_positives(model, x, y):
    """Focal loss divided by the number of positives in the batch, as detectors do."""
    p = model(x).sigmoid()
    ce = F.binary_cross_entropy(p, y, reduction="none")
    p_t = p * y + (1 - p) * (1 - y)
    return (ce * (1 - p_t) ** 2).sum() / y.sum().clamp(min=1)


@theme.loss(pixelwise, segmented, 8, adds="no")
def dice_over_the_batch(model, x, y):
    """Dice, of the union of all the batch's pixels."""
    p = model(x).sigmoid()
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


@theme.loss(pixelwise, segmented, 8)
def dice_per_sample(model, x, y):
    """Dice of each image, and their mean."""
    p, y = model(x).sigmoid().flatten(1), y.flatten(1)
    return (1 - (2 * (p * y).sum(1) + 1) / (p.sum(1) + y.sum(1) + 1)).mean()


@theme.loss(lambda: encoder(2), regression)
def gaussian_nll(model, batch):
    """Mean and variance are predicted."""
    mean, log_variance = model(batch[0]).chunk(2, dim=1)
    return F.gaussian_nll_loss(mean.squeeze(1), batch[1], log_variance.squeeze(1).exp())
