"""Models that were not made for influence scans, with samples and per-sample losses, in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 4


@dataclass
class Case:
    """A model, its per-sample loss and samples as a pytree."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    samples: Any


def classify(model, batch):
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none")


def labels(number):
    return torch.arange(number) % CLASSES


class Classifier(nn.Module):
    """A transformer over embedded tokens."""

    def __init__(self, batch_first=True):
        super().__init__()
        self.batch_first = batch_first
        self.embedding = nn.Embedding(11, 8, padding_idx=0)
        layers = [
            nn.TransformerEncoderLayer(
                8, 2, 12, dropout=0.1, batch_first=batch_first, norm_first=first
            )
            for first in (False, True)
        ]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        if not self.batch_first:
            return self.head(self.layers(hidden.transpose(0, 1)).mean(dim=0))
        return self.head(self.layers(hidden).mean(dim=1))


def transformer(number=7, batch_first=True):
    tokens = torch.randint(0, 11, (number, 7))
    return Case(Classifier(batch_first), classify, (tokens, labels(number)))


def cnn(number=7):
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, stride=2, padding=1, groups=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, dilation=2, padding="same", padding_mode="reflect", bias=False),
        nn.GroupNorm(2, 6),
        nn.Tanh(),
        nn.ConvTranspose2d(6, 4, 3, stride=2, output_padding=1, groups=2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )
    nn.init.uniform_(model[1].running_mean)
    nn.init.uniform_(model[1].running_var, 0.5, 2.0)
    return Case(model, classify, (torch.randn(number, 2, 9, 11), labels(number)))


def one_and_three_dimensions(number=5):
    model = nn.Sequential(
        nn.Conv1d(3, 4, 5, stride=3, padding=2),
        nn.Unflatten(2, (2, 2, 2)),
        nn.Conv3d(4, 5, (1, 2, 2), bias=True),
        nn.Flatten(),
        nn.LayerNorm(10),
        nn.Linear(10, CLASSES),
    )
    return Case(model, classify, (torch.randn(number, 3, 24), labels(number)))


class TiedLanguageModel(nn.Module):
    """Embedding and output share a matrix, and a block is called twice."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 6, padding_idx=2)
        self.block = nn.Linear(6, 6)
        self.output = nn.Linear(6, 9, bias=True)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        hidden = torch.tanh(self.block(torch.tanh(self.block(hidden))))
        return self.output(hidden)


def next_token(model, tokens):
    scores = model(tokens[:, :-1])
    return F.cross_entropy(scores.mT, tokens[:, 1:], reduction="none").sum(dim=1)


def tied(number=6):
    return Case(TiedLanguageModel(), next_token, torch.randint(0, 9, (number, 6)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, inputs):
        return self.head(self.lstm(inputs)[0][:, -1])


def lstm(number=6):
    return Case(Recurrent(), classify, (torch.randn(number, 4, 3), labels(number)))


class Functional(nn.Module):
    """Parameters without modules, used in ways of which some are not read."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(5))
        self.matrix = nn.Parameter(torch.randn(5, 6))
        self.table = nn.Parameter(torch.randn(3, 6))
        self.shift = nn.Parameter(torch.randn(6))
        self.power = nn.Parameter(torch.rand(6) + 1.0)
        self.mixed = nn.Parameter(torch.randn(6, 2, CLASSES))
        self.position = nn.Parameter(torch.randn(1, 4, 6))
        self.single = nn.Parameter(torch.tensor(0.7))

    def forward(self, inputs):
        hidden = (inputs * self.scale) @ self.matrix - self.shift
        hidden = hidden[:, None] + self.position
        hidden = (torch.sigmoid(hidden) ** self.power).sum(dim=1)
        hidden = hidden + self.table[(inputs[:, 0] > 0).long()] * self.single
        return torch.einsum("bf,fkc->bkc", hidden, self.mixed).sum(dim=1)


def functional(number=6):
    return Case(Functional(), classify, (torch.randn(number, 5), labels(number)))


class LearnedPositions(nn.Module):
    """Positions are looked up once for the whole batch; a weight is normalised."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.positions = nn.Embedding(10, 6)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(6, CLASSES))

    def forward(self, tokens):
        hidden = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(torch.tanh(hidden).mean(dim=1))


def positions(number=6):
    tokens = torch.randint(0, 7, (number, 5))
    return Case(LearnedPositions(), classify, (tokens, labels(number)))


CASES = {
    "transformer": transformer,
    "transformer, sequence first": lambda number=6: transformer(number, batch_first=False),
    "convolutions": cnn,
    "convolutions of 1 and 3 dimensions": one_and_three_dimensions,
    "tied": tied,
    "lstm": lstm,
    "functional": functional,
    "positions": positions,
}


def make(name, number=6):
    """Build a case in float64 and evaluation mode, always with the same numbers."""
    torch.manual_seed(sum(map(ord, name)))
    case = CASES[name](number)
    case.model.double().eval()

    def widened(value):
        return value.double() if value.is_floating_point() else value

    case.samples = torch.utils._pytree.tree_map(widened, case.samples)
    return case


def dense_gradients(case, rows):
    """Make each sample's whole gradient by a backward pass of its own: (B, P)."""
    parameters = [each for each in case.model.parameters() if each.requires_grad]
    found = []
    for row in rows:
        batch = torch.utils._pytree.tree_map(
            lambda each, row=row: each[row : row + 1], case.samples
        )
        (loss,) = case.loss(case.model, batch)
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        flat = [
            torch.zeros_like(parameter) if grad is None else grad.to_dense()
            for parameter, grad in zip(parameters, grads, strict=True)
        ]
        found.append(torch.cat([each.flatten() for each in flat]))
    return torch.stack(found)
