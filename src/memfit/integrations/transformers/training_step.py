"""The step of a Trainer as memfit's sessions call it: a loss of a batch, or of a piece of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from memfit.analysis.separability import Separability
from memfit.errors import MemfitError
from memfit.integrations.batches import Resized
from memfit.integrations.labels import Labels, LabelsSeen
from memfit.integrations.transformers.batches import (
    INPUTS,
    NUM_ITEMS,
    batch_of,
    of_size,
    rows_of,
)
from memfit.integrations.transformers.supported import check_supported
from memfit.job import Job, StepOrder, Total

_IGNORED = -100
_TOTAL, _TOTAL_NAME = "_total_train_tokens", "num_tokens"
"""What TRL's trainers count, and the metric that shows it."""


class Weighting(StrEnum):
    """How the losses of pieces make up that of their batch."""

    SAMPLES = "samples"
    """It is a mean over samples."""
    SUM = "sum"
    """It is a sum, divided by what the window holds: pieces add up as they are."""
    LABELS = "labels"
    """It is a mean over those labels that are not ignored."""


class TrainingStep:
    """Call ``training_step`` of a trainer on a batch, and keep the loss that it goes backward from.

    Args:
        trainer: whose training has begun.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.logged = _Logged(trainer)
        self.weighting = Weighting.SAMPLES
        self.count: Callable[[Any], Any] | None = None
        """Counts the labels of a batch; None where none is ignored."""
        self.proofs: dict[int, Separability] = {}
        """That pieces of some sizes keep the results, where they count as they do."""
        self.labels_seen: LabelsSeen | None = None
        """Told of the labels of losses, where they are looked for."""
        self.reference: Any = None
        """The batch that pieces are parts of, while none of the training is run."""
        self._whole: Any = None
        self._step = vars(trainer).get("training_step") or trainer.training_step

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor | Total:
        """Return the loss, or what it adds to that of the batch under way."""
        del model  # the one that the trainer has, in which stand-ins lie while it is recorded
        whole = self.reference if self._whole is None else self._whole
        with self.logged.piece(batch):
            loss = self._loss(batch)
        if self.weighting is Weighting.SAMPLES:
            return loss
        if self.weighting is Weighting.LABELS:
            loss = self._by_labels(loss, batch, whole)
        return Total(loss, rows_of(batch) / rows_of(whole))

    @property
    def counted_leaf(self) -> int | None:
        """Return the labels that pieces count by, as a part of the batch."""
        if self.weighting is Weighting.LABELS and isinstance(self.count, Labels):
            return self.count.leaf
        return None

    @contextmanager
    def running(self, batch: Any) -> Iterator[None]:
        """Run a batch of the training itself: what it logs is kept."""
        self._whole = batch
        self.logged.begin()
        try:
            yield
        finally:
            self._whole = None
            self.logged.end()

    def _loss(self, batch: Any) -> torch.Tensor:
        """Return the loss that the trainer's own step would go backward from.

        Raises:
            MemfitError: if it goes backward otherwise than once.
        """
        losses: list[torch.Tensor] = []
        accelerator = self.trainer.accelerator

        def keep(loss: torch.Tensor, **_: Any) -> None:
            losses.append(loss)

        accelerator.backward = keep
        try:
            if self.labels_seen is None:
                self._step(self.trainer.model_wrapped, batch[INPUTS], batch.get(NUM_ITEMS))
            else:
                with self.labels_seen.noting(batch):
                    self._step(self.trainer.model_wrapped, batch[INPUTS], batch.get(NUM_ITEMS))
        finally:
            del accelerator.backward
        if len(losses) != 1:
            msg = (
                f"training_step goes backward {len(losses)} times through the accelerator, and one "
                "loss is needed. Return it from compute_loss, and let the Trainer go backward."
            )
            raise MemfitError(msg)
        return losses[0].reshape(()) if losses[0].numel() == 1 else losses[0]

    def _by_labels(self, loss: torch.Tensor, batch: Any, whole: Any) -> torch.Tensor:
        """Have a piece count by its labels."""
        if batch is whole or self.count is None:
            return loss
        terms = self.count(batch)
        is_empty = self._whole is not None and not int(terms)
        if is_empty:  # the mean of nothing is no number
            trained = [p.sum() * 0 for p in self.trainer.model.parameters() if p.requires_grad]
            return torch.stack(trained).sum().to(loss.dtype)
        share = torch.as_tensor(terms, device=loss.device).to(loss.dtype) / self.count(whole)
        weighted: torch.Tensor = loss * share
        return weighted


def job_of(step: TrainingStep, inputs: Any) -> Job:
    """Describe the training of a trainer that has begun as a job on its living objects.

    Args:
        step: of the trainer.
        inputs: the largest batch that there is, where the step will see it.

    Raises:
        MemfitError: if it is a training that cannot be described so.
    """
    trainer: Any = step.trainer
    check_supported(trainer)
    length = trainer.args.gradient_accumulation_steps
    num_items = trainer._get_num_items_in_batch([inputs] * length, trainer.args.device)
    trainer.current_gradient_accumulation_steps = length
    batch = batch_of(inputs, num_items)
    step.reference = batch
    module: torch.nn.Module = trainer.model
    optimizer = torch_optimizer(trainer)

    changing = [*filter(changes_gradients, trainer.callback_handler.callbacks)]

    def model(_also: Any = (trainer, changing)) -> torch.nn.Module:
        return module

    # The Trainer takes the norm always.
    norm = trainer.args.max_grad_norm or float("inf")

    def clip(_: torch.optim.Optimizer) -> None:
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), norm)

    return Job(
        model=model,
        batch=Resized(batch, of_size),
        loss=step,
        optimizer=lambda _: optimizer,
        batch_size=rows_of(batch),
        name=type(module).__name__,
        order=StepOrder(num_batches=length, before_update=clip),
    )


def torch_optimizer(trainer: Any) -> torch.optim.Optimizer:
    """Return the optimizer itself, out of what the accelerator has put around it."""
    optimizer = trainer.optimizer
    while not isinstance(optimizer, torch.optim.Optimizer) or "optimizer" in vars(optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def changes_gradients(callback: Any) -> bool:
    """Return whether a callback does something between the norm and the update."""
    function = getattr(type(callback), "on_pre_optimizer_step", None)
    return getattr(function, "__module__", "transformers").partition(".")[0] != "transformers"


@dataclass(slots=True)
class _Piece:
    """What one piece has logged."""

    weight: float
    calls: list[Mapping[str, Any]] = field(default_factory=list)
    metrics: dict[str, list[Any]] = field(default_factory=dict)
    num_tokens: Any = 0


class _Logged:
    """Collect calls of ``trainer.log`` inside losses, and what TRL's trainers note of every step.

    A loss leaves none of it behind: it is logged once its batch is done.

    Args:
        trainer: that logs.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._pieces: list[_Piece] = []
        self._counts = False

    def begin(self) -> None:
        """Begin with a batch of the training itself."""
        self._pieces, self._counts = [], True

    def end(self) -> None:
        """End with the batch: what comes is not of the training."""
        self._counts = False

    @contextmanager
    def piece(self, batch: Any) -> Iterator[None]:
        """Keep what is logged inside; what a recording logs is dropped."""
        found = _Piece(self._weight(batch) if self._counts else 1.0)
        own = vars(self._trainer)
        before, total = own.get("log"), own.get(_TOTAL)
        metrics = self._metrics()
        lists = dict(metrics)
        lengths = {name: len(values) for name, values in lists.items()}

        def keep(logs: Mapping[str, Any], *_: Any, **__: Any) -> None:
            found.calls.append(dict(logs))

        self._trainer.log = keep
        try:
            yield
        finally:
            if before is None:
                del self._trainer.log
            else:
                self._trainer.log = before
            if total is not None:
                found.num_tokens = own[_TOTAL] - total
                own[_TOTAL] = total
            found.metrics = _taken_out(metrics, lists, lengths)
        if self._counts:
            self._pieces.append(found)

    def flush(self) -> None:
        """Log what the pieces of a batch have, once."""
        pieces, self._pieces = self._pieces, []
        weights = [piece.weight for piece in pieces]
        own, metrics = vars(self._trainer), self._metrics()
        if _TOTAL in own:
            own[_TOTAL] += sum(piece.num_tokens for piece in pieces)
        for name in pieces[0].metrics:
            if name == _TOTAL_NAME:
                metrics[name] = [own.get(_TOTAL)]
                continue
            for values in zip(*(piece.metrics.get(name, ()) for piece in pieces), strict=False):
                metrics.setdefault(name, []).append(_mean(values, weights))
        for calls in zip(*(piece.calls for piece in pieces), strict=False):
            names = calls[0]
            self._trainer.log(
                {name: _mean([each.get(name) for each in calls], weights) for name in names}
            )

    def _weight(self, batch: Any) -> float:
        """Return what a piece counts: its labels where TRL means over tokens, else its samples."""
        labels = batch[INPUTS].get("labels")
        if not hasattr(self._trainer, "_metrics") or labels is None or labels.dim() < 2:
            return float(rows_of(batch))
        shifts = getattr(self._trainer, "_loss_shifts_labels", False)
        return float((labels[..., 1:] if shifts else labels).ne(_IGNORED).sum())

    def _metrics(self) -> dict[str, list[Any]]:
        """Return the lists that TRL's trainers append to in every step."""
        metrics = getattr(self._trainer, "_metrics", None)
        found = metrics.get("train") if isinstance(metrics, Mapping) else None
        return found if isinstance(found, dict) else {}


def _taken_out(
    metrics: dict[str, list[Any]], lists: Mapping[str, list[Any]], lengths: Mapping[str, int]
) -> dict[str, list[Any]]:
    """Take what was added to lists out of them again, and give it."""
    found: dict[str, list[Any]] = {}
    for name in [*metrics]:
        values = metrics[name]
        before = lists.get(name)
        if values is not before:  # another list has taken its place
            found[name] = [*values]
            if before is None:
                del metrics[name]
            else:
                metrics[name] = before
        elif len(values) > lengths[name]:
            found[name] = values[lengths[name] :]
            del values[lengths[name] :]
    return found


def _mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the mean of numbers; of anything else the last."""
    if len(values) == 1 or not all(isinstance(value, (int, float)) for value in values):
        return values[-1]
    whole = sum(weights)
    if not whole:
        return values[-1]
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / whole
