"""Language and retrieval, as public code trains them."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional as F

from exactness.case import Theme
from exactness.parts import (
    NUM_TOKENS,
    cross_entropy,
    encoder,
    labelled,
    make_job,
    padded_tokens,
    tagger,
    tokens,
    two_views,
    vectors,
)
from memfit import Total

theme = Theme("public")


@theme.loss(
    tagger,
    padded_tokens,
    source="facebookresearch/fairseq fairseq/criterions/wav2vec_criterion.py (sample_size)",
)
def sum_and_sample_size(model, ids, _):
    """A criterion that returns a sum and what to divide gradients by."""
    logp = model(ids).log_softmax(-1)
    real = (ids != 0).to(logp.dtype)
    nll = -logp.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    smooth = -logp.sum(-1)
    return Total((real * (0.9 * nll + 0.01 * smooth)).sum(), real.sum())


def sequence_losses(model, ids):
    weights = (ids != 0).to(torch.get_default_dtype())
    logp = model(ids).log_softmax(-1)
    nll = -torch.gather(logp.view(-1, NUM_TOKENS), 1, ids.view(-1, 1)).view(*ids.shape)
    return (nll * weights).sum(1), weights.sum(1)


@theme.loss(tagger, padded_tokens, source="allenai/allennlp allennlp/nn/util.py (average='batch')")
def sequence_average_by_batch(model, batch):
    """Each sequence's own mean, then the mean over the sequences that are not empty."""
    total, count = sequence_losses(model, batch[0])
    return (total / (count + 1e-13)).sum() / ((count > 0).sum() + 1e-13)


@theme.loss(
    tagger,
    padded_tokens,
    adds="no",
    source="allenai/allennlp allennlp/nn/util.py (average='token')",
)
def sequence_average_by_token(model, batch):
    """All sequences' tokens together."""
    total, count = sequence_losses(model, batch[0])
    return total.sum() / (count.sum() + 1e-13)


class Crf(nn.Module):
    def __init__(self):
        super().__init__()
        self.emit = nn.Embedding(NUM_TOKENS, 4)
        self.start, self.moves = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.randn(4, 4) * 0.1)

    def forward(self, ids, tags, mask):
        emissions = self.emit(ids).transpose(0, 1)
        tags, mask, rows = tags.T, mask.T, torch.arange(len(ids))
        score = self.start[tags[0]] + emissions[0, rows, tags[0]]
        norm = self.start + emissions[0]
        for i in range(1, len(tags)):
            move = self.moves[tags[i - 1], tags[i]] + emissions[i, rows, tags[i]]
            score = score + move * mask[i]
            following = torch.logsumexp(
                norm[:, :, None] + self.moves + emissions[i][:, None], dim=1
            )
            norm = torch.where(mask[i].unsqueeze(1), following, norm)
        return torch.logsumexp(norm, dim=1) - score


@theme.loss(Crf, padded_tokens, 8, source="kmkurn/pytorch-crf torchcrf/__init__.py (mean)")
def crf_by_sequence(model, ids, _):
    """A conditional random field's likelihood of each padded sequence."""
    return model(ids, ids % 4, ids != 0).mean()


@theme.loss(
    Crf, padded_tokens, 8, adds="no", source="kmkurn/pytorch-crf torchcrf/__init__.py (token_mean)"
)
def crf_by_token(model, ids, _):
    """The same, divided by the batch's number of real tokens."""
    mask = ids != 0
    return model(ids, ids % 4, mask).sum() / mask.sum()


@theme.loss(
    tagger,
    lambda size: (tokens(size), -torch.rand(size) * 8 - 15, torch.arange(size) % 3 == 0),
    adds="no",
    source="huggingface/trl trl/trainer/kto_trainer.py",
)
def kto(model, ids, reference, wanted):
    """The batch's mean log-ratio, detached, is every sample's reference point."""
    logp = model(ids).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1).sum(1)
    ratio = logp - reference
    point = ratio.mean().detach().clamp(min=0)
    gain = torch.sigmoid(0.3 * (ratio - point))
    return torch.where(wanted, 1 - gain, 1.3 * gain).mean()


@theme.loss(
    tagger,
    lambda size: (tokens(size), tokens(size), -torch.rand(size), -torch.rand(size)),
    source="huggingface/trl trl/trainer/dpo_trainer.py",
)
def dpo(model, chosen, rejected, one, other):
    """Chosen and rejected answers in one forward, with the reference's log-probabilities given."""
    ids = torch.cat([chosen, rejected], dim=0)
    logp = model(ids).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1).sum(-1)
    good, bad = logp[: len(chosen)], logp[len(chosen) :]
    return -F.logsigmoid(0.1 * ((good - one) - (bad - other))).mean()


def scored_pairs(size):
    return (*two_views(size), torch.rand(size))


@theme.loss(
    encoder,
    scored_pairs,
    adds="no",
    source="UKPLab/sentence-transformers sentence_transformers/losses/CoSENTLoss.py",
)
def cosent(model, batch):
    """One log-sum-exp over all pairs of pairs in the batch."""
    scores = 5 * F.cosine_similarity(model(batch[0]), model(batch[1]))
    gaps = scores[:, None] - scores[None, :]
    wrong = batch[2][:, None] < batch[2][None, :]
    gaps = torch.cat([torch.zeros(1), gaps.masked_fill(~wrong, -1e12).view(-1)])
    return torch.logsumexp(gaps, dim=0)


@theme.loss(
    encoder,
    lambda size: (*(vectors(size) for _ in range(3)), torch.randn(size)),
    source="UKPLab/sentence-transformers sentence_transformers/losses/MarginMSELoss.py",
)
def margin_mse(model, batch):
    """A teacher's margins between a query's positive and negative passage are imitated."""
    query, positive, negative = (model(x) for x in batch[:3])
    return F.mse_loss((query * positive).sum(-1) - (query * negative).sum(-1), batch[3])


@theme.loss(
    encoder,
    lambda size: (*two_views(size), torch.arange(size) % 2),
    adds="no",
    source="UKPLab/sentence-transformers sentence_transformers/losses/OnlineContrastiveLoss.py",
)
def online_contrastive(model, batch):
    """Pairs count if they are harder than the batch's easiest pair of the other kind."""
    distance = 1 - F.cosine_similarity(model(batch[0]), model(batch[1]))
    negative, positive = distance[batch[2] == 0], distance[batch[2] == 1]
    far = positive[positive > (negative.min() if len(negative) else positive.mean())]
    near = negative[negative < (positive.max() if len(positive) else negative.mean())]
    return far.pow(2).sum() + F.relu(0.5 - near).pow(2).sum()


@theme.loss(
    encoder,
    scored_pairs,
    draws="shared",
    source="UKPLab/sentence-transformers sentence_transformers/losses/MatryoshkaLoss.py",
)
def matryoshka_with_drawn_dimensions(model, batch):
    """Each step draws two of the lengths to which all embeddings are cut."""
    a, b = model(batch[0]), model(batch[1])
    lengths = random.sample([2, 4, 6, 8], 2)
    return sum(F.mse_loss(F.cosine_similarity(a[:, :n], b[:, :n]), batch[2]) for n in lengths)


@theme.loss(
    encoder,
    scored_pairs,
    source="UKPLab/sentence-transformers sentence_transformers/losses/MatryoshkaLoss.py",
)
def matryoshka_with_all_dimensions(model, batch):
    """The same with all lengths at once."""
    a, b = model(batch[0]), model(batch[1])
    similar = [F.cosine_similarity(a[..., :n], b[..., :n]) for n in (2, 4, 6, 8)]
    return sum(F.mse_loss(each, batch[2]) for each in similar)


def with_dropout():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))


@theme.loss(
    with_dropout,
    labelled,
    draws="per-sample",
    source="dropreg/R-Drop (two dropout masks of the same samples in one forward)",
)
def r_drop(model, x, y):
    """Each sample runs twice, with two masks; both predictions are held together."""
    logits = model(torch.cat([x, x]))
    p, q = (each.log_softmax(-1) for each in logits.chunk(2))
    apart = F.kl_div(p, q, log_target=True, reduction="batchmean")
    return F.cross_entropy(logits, torch.cat([y, y])) + apart


@theme.case(
    draws="shared",
    source="facebookresearch/fairseq fairseq/modules (LayerDrop of whole layers)",
)
def layer_drop_by_torch():
    """A draw from torch decides whether a layer is left out, for all samples."""

    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
            self.head = nn.Linear(12, 4)

        def forward(self, x):
            for layer in self.layers:
                if torch.empty(1).uniform_().item() > 0.4:
                    x = x + torch.tanh(layer(x))
            return self.head(x)

    return make_job(Dropping, labelled, cross_entropy)


@theme.loss(
    encoder,
    scored_pairs,
    source="UKPLab/sentence-transformers sentence_transformers/losses/CosineSimilarityLoss.py",
)
def cosine_similarity_of_pairs(model, batch):
    """The cosine of each pair imitates its score."""
    return F.mse_loss(torch.cosine_similarity(model(batch[0]), model(batch[1])), batch[2])


@theme.loss(
    encoder,
    lambda size: (*two_views(size), (torch.arange(size) % 3 == 0).float()),
    source="UKPLab/sentence-transformers sentence_transformers/losses/ContrastiveLoss.py",
)
def contrastive_pairs(model, batch):
    """Pairs of the loader, alike or not, with a margin."""
    distance = 1 - F.cosine_similarity(model(batch[0]), model(batch[1]))
    y = batch[2]
    return (0.5 * (y * distance.pow(2) + (1 - y) * F.relu(0.5 - distance).pow(2))).mean()


@theme.loss(
    encoder,
    lambda size: tuple(vectors(size) for _ in range(3)),
    adds="no",
    source="UKPLab/sentence-transformers losses/MultipleNegativesRankingLoss.py",
)
def multiple_negatives_ranking(model, batch):
    """The other pairs' passages are a query's negatives, besides one hard one of its own."""
    query, *documents = (F.normalize(model(x), dim=-1) for x in batch)
    return F.cross_entropy(20 * query @ torch.cat(documents).T, torch.arange(len(query)))
