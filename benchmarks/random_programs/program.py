"""A random program: a loss over a small model, and what cutting its batch does to the gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit import Job
from random_programs.operators import FAMILIES, NUM_CLASSES, NUM_FEATURES, NUM_ROWS, Operation

BATCH_SIZE, PIECE_SIZE = 8, 2
_MOST_NUMBERS = 5_000
_FAILING_IN_PIECES = 0.15
"""The share of operations that fail on a piece of the batch which are taken nevertheless."""

Batch = tuple[Tensor, Tensor]


class Model(nn.Module):
    """Maps rows of features to rows of features."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.bias = nn.Parameter(torch.randn(NUM_ROWS, NUM_FEATURES) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(N, rows, features)`` to the same shape."""
        return torch.tanh(self.linear(x)) + self.bias


def make_model(seed: int = 0) -> Model:
    """Make the model; the same each time for one seed."""
    torch.manual_seed(seed)
    return Model()


def make_batch(num_samples: int, seed: int = 0) -> Batch:
    """Return features and labels; those of fewer samples are the first ones of more."""
    torch.manual_seed(seed + 5)
    features = torch.randn(BATCH_SIZE, NUM_ROWS, NUM_FEATURES) * 1.3
    return features[:num_samples], torch.randint(0, NUM_CLASSES, (BATCH_SIZE,))[:num_samples]


def _as_classes(t: Tensor, labels: Tensor) -> Tensor:
    scores = t.reshape(len(labels), -1)
    return F.cross_entropy(scores, labels % scores.shape[1])


_ENDS: Sequence[Callable[[Tensor, Tensor], Tensor]] = (
    lambda t, _labels: t.mean(),
    lambda t, _labels: t.mean(),
    lambda t, labels: t.sum() / len(labels),
    lambda t, _labels: t.flatten(1).sum(1).mean(),
    lambda t, _labels: t.sum() / 16,
    lambda t, _labels: t.square().mean(),
    lambda t, _labels: F.mse_loss(t, torch.zeros_like(t)),
    lambda t, labels: F.smooth_l1_loss(t, torch.ones_like(t), reduction="sum") / len(labels),
    _as_classes,
)


@dataclass(frozen=True)
class Term:
    """One term of a loss: which tensor, how it becomes a scalar, and its weight."""

    index: int
    end: Callable[[Tensor, Tensor], Tensor]
    weight: float


@dataclass(frozen=True)
class Program:
    """Operations on the features that a model gives, and the terms that make up the loss."""

    operations: tuple[Operation, ...]
    terms: tuple[Term, ...]
    names: tuple[str, ...]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the loss of a batch."""
        values = run(self.operations, model, batch)
        terms = [each.weight * each.end(values[each.index], batch[1]) for each in self.terms]
        return torch.stack(terms).sum()

    def job(self) -> Job:
        """Make a job of it."""
        return Job(
            model=make_model,
            batch=make_batch,
            loss=self.loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            batch_size=BATCH_SIZE,
        )


def run(operations: Sequence[Operation], model: nn.Module, batch: Batch) -> list[Tensor]:
    """Return the features, the labels and what each operation makes."""
    values = [model(batch[0]), batch[1]]
    for operation in operations:
        values.append(operation(values, len(batch[0])))
    return values


def make_program(seed: int) -> Program | None:
    """Draw a program; None if the loss that was drawn cannot be computed or needs no gradient."""
    random = Random(seed)
    wanted = random.choice([2, 3, 4, 5, 7])
    model, batch = make_model(), make_batch(BATCH_SIZE)
    operations: list[Operation] = []
    names: list[str] = []
    for _ in range(200):
        name = random.choice(list(FAMILIES))
        if len(operations) == wanted:
            break
        there = run(operations, model, batch)
        operation = FAMILIES[name](random, there)
        if _is_usable(operation, operations, model, batch, random):
            operations.append(operation)
            names.append(name)
    indices = [0, *range(2, len(operations) + 2)][-3:]
    chosen = random.sample(indices, min(len(indices), random.choice([1, 1, 2])))
    terms = [Term(i, random.choice(_ENDS), random.choice([1.0, 1.0, 0.1, 1e-6])) for i in chosen]
    program = Program(tuple(operations), tuple(terms), tuple(names))
    return program if _can_be_trained(program, model, batch) else None


def _is_usable(
    operation: Operation, before: list[Operation], model: nn.Module, batch: Batch, random: Random
) -> bool:
    try:
        made = operation(run(before, model, batch), BATCH_SIZE)
    except (RuntimeError, IndexError, ValueError, TypeError, AssertionError):
        return False
    if not 0 < made.numel() <= _MOST_NUMBERS or not made.is_floating_point():
        return False
    if not torch.isfinite(made).all():
        return False
    try:
        run([*before, operation], model, make_batch(PIECE_SIZE))
    except (RuntimeError, IndexError, ValueError, TypeError, AssertionError):
        return random.random() < _FAILING_IN_PIECES
    return True


def _can_be_trained(program: Program, model: nn.Module, batch: Batch) -> bool:
    try:
        gradients = _gradients(program, model, batch)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return False
    return bool(torch.isfinite(gradients).all())


def _gradients(program: Program, model: nn.Module, batch: Batch) -> Tensor:
    parameters = list(model.parameters())
    found = torch.autograd.grad(program.loss(model, batch), parameters, materialize_grads=True)
    return torch.cat([each.flatten() for each in found])


def error_in_pieces(program: Program) -> float:
    """Return the largest relative error of the gradient in pieces, over weights and batches.

    Infinite where the program fails on a piece.
    """
    worst = 0.0
    for seed in range(3):
        model, (features, labels) = make_model(seed), make_batch(BATCH_SIZE, seed)
        whole = _gradients(program, model, (features, labels))
        cuts = range(0, BATCH_SIZE, PIECE_SIZE)
        pieces = [(features[i : i + PIECE_SIZE], labels[i : i + PIECE_SIZE]) for i in cuts]
        try:
            mean = torch.stack([_gradients(program, model, each) for each in pieces]).mean(0)
        except (RuntimeError, IndexError, ValueError, TypeError):
            return math.inf
        error = float((whole - mean).norm()) / max(float(whole.norm()), 1e-9)
        worst = max(worst, error if math.isfinite(error) else 0.0)
    return worst
