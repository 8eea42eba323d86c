"""What a training loop of the collection is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit import Job, Plan
from memfit.runtime.run import Run

BATCH_SIZE, WIDTH, NUM_CLASSES, NUM_STEPS = 8, 6, 3, 6


def _nothing(run: Run, number: int) -> None:
    """Do nothing between steps."""
    del run, number


def _not_started(run: Run) -> None:
    """Attach nothing to the run."""
    del run


@dataclass(kw_only=True)
class Training:
    """A loop around ``run.step``, everything built anew."""

    job: Job
    draw: Callable[[int], Any]
    """Gives the batch of a step, counted from 0."""
    strategies: Sequence[Any] = ()
    started: Callable[[Run], None] = _not_started
    """What the caller attaches to the run: schedulers, hooks."""
    before: Callable[[Run, int], None] = _nothing
    after: Callable[[Run, int], None] = _nothing
    watched: Sequence[Any] = ()
    """What the loop changes and neither model, optimizer nor the job's functions reach."""
    closed: Callable[[], None] = lambda: None
    """Closes files."""

    @property
    def plan(self) -> Plan:
        """Return a plan whose smaller plans are the same, so that results are equal to the bit."""
        rung = Plan(strategies=tuple(self.strategies))
        return Plan(strategies=rung.strategies, ladder=(rung,) * 8)

    def start(self) -> Run:
        """Start the run."""
        return memfit.start(self.job, self.plan)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A way to build a training, and how it may end."""

    name: str
    build: Callable[[], Training]
    must_say: str = ""
    """What a run has to name when it starts, since it cannot be put back."""
    may_end: str = ""
    """Words of the true reason with which a cut update may end the run."""


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    name: str, *, of: str = "", must_say: str = "", may_end: str = ""
) -> Callable[[Any], Any]:
    """Add a training to the collection.

    It is what the function builds; or, of the small network with a ``layer``, a ``loss`` or an
    ``optimizer`` by the class or function, or of a ``model`` by it.
    """

    def added(part: Any) -> Any:
        assert name not in SCENARIOS, name
        build = partial(_TRAININGS[of], part) if of else part
        SCENARIOS[name] = Scenario(name=name, build=build, must_say=must_say, may_end=may_end)
        return part

    return added


def classifier(*between: nn.Module, dropout: float = 0.2) -> nn.Sequential:
    """Build a small network, with modules of the scenario in the middle."""
    return nn.Sequential(
        nn.Linear(WIDTH, 12), *between, nn.ReLU(), nn.Dropout(dropout), nn.Linear(12, NUM_CLASSES)
    )


def labelled(num_batches: int = NUM_STEPS, size: int = BATCH_SIZE) -> list[Any]:
    """Draw inputs with their classes."""
    return [
        (torch.randn(size, WIDTH), torch.randint(0, NUM_CLASSES, (size,)))
        for _ in range(num_batches)
    ]


def one_batch(size: int) -> Any:
    """Build a batch of inputs with their classes."""
    return torch.randn(size, WIDTH), torch.randint(0, NUM_CLASSES, (size,))


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    """Compare with the classes."""
    inputs, classes = batch
    return F.cross_entropy(model(inputs), classes)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer that most people take."""
    return torch.optim.AdamW(parameters, lr=0.05)


def training_of(
    model: nn.Module,
    *,
    loss: Callable[..., Any] = cross_entropy,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    batches: Sequence[Any] | None = None,
    clip_grad_norm: float | None = None,
    **rest: Any,
) -> Training:
    """Put a training together around a model that is there already."""
    drawn = labelled() if batches is None else batches
    job = Job(
        model=lambda: model,
        batch=one_batch,
        loss=loss,
        optimizer=optimizer,
        batch_size=BATCH_SIZE,
        clip_grad_norm=clip_grad_norm,
    )
    rest.setdefault("draw", lambda number: drawn[number])
    return Training(job=job, **rest)


_TRAININGS: dict[str, Callable[[Any], Training]] = {
    "layer": lambda part: training_of(classifier(part())),
    "model": lambda part: training_of(part()),
    "loss": lambda part: training_of(classifier(), loss=part()),
    "optimizer": lambda part: training_of(classifier(), optimizer=part),
}
