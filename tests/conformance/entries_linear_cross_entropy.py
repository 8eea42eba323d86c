"""The entry of linear-cross-entropy, and the language models that it is tried on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from memfit import Job, Total
from memfit.strategies.linear_cross_entropy import LinearCrossEntropy

from .builders import Entry, TiedLanguageModel, many_candidates, sgd

VOCABULARY = 1030


class Tagger(nn.Module):
    """Classify every position with a layer that has a bias, classes in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids):
        return self.head(torch.tanh(self.embedding(ids))).transpose(1, 2)


def shifted_tokens(
    width: int = 8, vocabulary: int = VOCABULARY, num_tokens: int = 9, batch_size: int = 7
) -> Job:
    """Return a tied language model, whose loss shifts tokens, and a mean over true tokens."""

    def batch(size):
        ids = torch.randint(0, vocabulary, (size, num_tokens))
        lengths = torch.randint(2, num_tokens + 1, (size, 1))
        return {"ids": ids, "labels": torch.where(torch.arange(num_tokens) < lengths, ids, -100)}

    def loss(model, batch):
        logits = model(batch["ids"])[..., :-1, :].contiguous()
        labels = batch["labels"][..., 1:].contiguous()
        total = F.cross_entropy(
            logits.view(-1, logits.size(-1)), labels.view(-1), reduction="sum", label_smoothing=0.1
        )
        return Total(total, (labels != -100).sum())

    return Job(
        model=lambda: TiedLanguageModel(width, vocabulary),
        batch=batch,
        loss=loss,
        optimizer=sgd,
        batch_size=batch_size,
    )


def tagged_tokens() -> Job:
    """Return a model that scores classes in the second dimension, and weights of classes."""
    importance = torch.linspace(0.5, 2.0, VOCABULARY, dtype=torch.float64)

    def loss(model, batch):
        scores = model(batch["ids"])
        return F.cross_entropy(scores, batch["tags"], weight=importance.to(scores.dtype))

    return Job(
        model=Tagger,
        batch=lambda size: {
            "ids": torch.randint(0, 50, (size, 5)),
            "tags": torch.randint(0, VOCABULARY, (size, 5)),
        },
        loss=loss,
        optimizer=sgd,
        batch_size=6,
    )


def log_probabilities() -> Job:
    """Return a loss in two parts: a softmax, and what it gives the true classes."""

    def loss(model, batch):
        scores = F.log_softmax(model(batch), dim=-1)
        return F.nll_loss(scores.flatten(0, 1), batch.flatten())

    return Job(
        model=lambda: TiedLanguageModel(8, VOCABULARY),
        batch=lambda size: torch.randint(0, VOCABULARY, (size, 6)),
        loss=loss,
        optimizer=sgd,
        batch_size=5,
    )


def large_shifted_tokens() -> Job:
    return shifted_tokens(width=32, vocabulary=4096, num_tokens=65, batch_size=16)


ENTRIES: tuple[Entry, ...] = (
    Entry(
        strategy=LinearCrossEntropy,
        settings=tuple(LinearCrossEntropy(num_rows=number) for number in (1, 10, 1000)),
        jobs=(shifted_tokens, tagged_tokens, log_probabilities),
        large_job=large_shifted_tokens,
        large_settings=tuple(LinearCrossEntropy(num_rows=number) for number in (256, 100)),
        refusal=(
            LinearCrossEntropy(num_rows=128),
            many_candidates,
            "no output layer with many classes",
        ),
    ),
)
