"""Means over tokens, entropies, and statistics of the batch in a loss."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from exactness.case import Theme
from exactness.parts import (
    NUM_TOKENS,
    classifier,
    encoder,
    labelled,
    make_job,
    padded_tokens,
    regression,
    scorer,
    tagger,
    tokens,
)
from memfit import Total

theme = Theme("blind")


def transcribed(size):
    lengths = 2 + torch.arange(size) % 2
    return torch.randn(size, 9, 12), torch.randint(1, 5, (size, 3)), lengths


@theme.loss(lambda: encoder(5), transcribed, 8)
def ctc(model, x, targets, lengths):
    """CTC with mean reduction: divided by each target's length, then by the batch."""
    logp = model(x).log_softmax(-1).transpose(0, 1)
    inputs = torch.full((len(x),), 9, dtype=torch.long)
    return F.ctc_loss(logp, targets, inputs, lengths)


@theme.loss(tagger, padded_tokens)
def total_over_ragged_tokens(model, ids, _):
    """A Total over the tokens that are not padding."""
    real = ids != 0
    losses = F.cross_entropy(model(ids).transpose(1, 2), ids, reduction="none")
    return Total((losses * real).sum(), real.sum())


@theme.loss(tagger, padded_tokens, adds="no")
def token_mean_with_ignored_entries(model, ids, _):
    """``ignore_index`` with labels that hold it: the mean is over the tokens that are left."""
    labels = ids.masked_fill(ids == 0, -100)
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


@theme.loss(tagger, tokens)
def token_mean_without_ignored_entries(model, ids):
    """``ignore_index`` is set, but no label holds it."""
    return F.cross_entropy(model(ids).view(-1, NUM_TOKENS), ids.view(-1), ignore_index=-100)


@theme.loss(tagger, padded_tokens)
def token_mean_per_sequence(model, ids, lengths):
    """Each sequence's mean over its own tokens, then the mean over the batch."""
    losses = F.cross_entropy(model(ids).transpose(1, 2), ids, reduction="none")
    real = torch.arange(ids.shape[1]) < lengths[:, None]
    return ((losses * real).sum(1) / lengths).mean()


@theme.loss(tagger, padded_tokens, adds="no")
def token_mean_by_a_mask(model, ids, _):
    """A boolean mask picks the real tokens of all sequences, then comes their mean."""
    real = ids != 0
    return F.cross_entropy(model(ids)[real], ids[real])


@theme.loss(classifier, labelled)
def entropy_bonus_per_sample(model, batch):
    """Each sample's own entropy is a bonus."""
    logp = model(batch[0]).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return F.nll_loss(logp, batch[1]) - 0.05 * entropy.mean()


@theme.loss(classifier, labelled, adds="no")
def entropy_of_the_mean_prediction(model, batch):
    """The entropy of the batch's mean prediction is a bonus."""
    logits = model(batch[0])
    mean = logits.softmax(-1).mean(0)
    return F.cross_entropy(logits, batch[1]) + 0.05 * (mean * mean.log()).sum()


@theme.loss(classifier, labelled, adds="no")
def balance_with_a_tiny_coefficient(model, batch):
    """The squared mean of the scores over the batch, times one hundred-thousandth."""
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1]) + 1e-5 * logits.mean(0).pow(2).sum()


@theme.loss(scorer, regression, adds="no")
def detached_batch_statistic(model, batch):
    """Losses divided by their own mean, which is detached."""
    losses = (model(batch[0]) - batch[1]).pow(2)
    return (losses * (losses / losses.mean()).detach()).mean()


@theme.case()
def logged_with_item():
    """A mean that is read for a log on the way."""
    log = []

    def loss(model, batch):
        value = F.cross_entropy(model(batch[0]), batch[1])
        if value.item() > 1e4:
            log.append("exploding")
        return value

    return make_job(classifier, labelled, loss)
