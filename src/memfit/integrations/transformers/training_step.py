"""The step of a Trainer as memfit's sessions call it: a loss of a batch, or of a piece of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import torch

from memfit.analysis.separability import Separability
from memfit.errors import MemfitError
from memfit.integrations.labels import Labels, LabelsSeen
from memfit.integrations.transformers.batches import (
    INPUTS,
    NUM_ITEMS,
    batch_of,
    of_size,
    rows_of,
)
from memfit.integrations.transformers.logged import Logged
from memfit.integrations.transformers.supported import check_supported
from memfit.job import Job, StepOrder, Total


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
        self.logged = Logged(trainer)
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

    return Job(
        model=model,
        batch=_Resized(batch),
        loss=step,
        optimizer=lambda _: optimizer,
        batch_size=rows_of(batch),
        name=type(module).__name__,
        order=StepOrder(num_batches=length, before_update=_clipping(trainer)),
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


class _Resized:
    """Give a batch in any number of samples.

    Args:
        batch: a real one; the walks over a job's objects leave it alone.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __call__(self, batch_size: int) -> Any:
        """Return so many samples."""
        return of_size(self._batch, batch_size)


def _clipping(trainer: Any) -> Callable[[torch.optim.Optimizer], None]:
    """Return what is done to gradients before the update: the Trainer takes their norm always."""
    norm = trainer.args.max_grad_norm or float("inf")

    def clip(_: torch.optim.Optimizer) -> None:
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), norm)

    return clip
