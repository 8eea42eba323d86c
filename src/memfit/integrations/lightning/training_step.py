"""The training step of a LightningModule as memfit's sessions call it: a loss of a batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from memfit.errors import MemfitError, StrategyError
from memfit.integrations.batches import Resized, num_rows
from memfit.integrations.labels import LabelsSeen
from memfit.integrations.lightning.framework import inside_hook, part_of
from memfit.integrations.lightning.logged_values import LoggedValues
from memfit.integrations.lightning.metrics import Metrics
from memfit.integrations.lightning.muted_loggers import StepLoggers
from memfit.job import Job, StepOrder

HOOK = "training_step"


class StepSkippedError(MemfitError):
    """Leave a step whose ``training_step`` returned None, as Lightning has it skipped."""


Count = Callable[[Any], Any]
"""Counts the terms that the mean over a batch is taken of."""


class _Whole(NamedTuple):
    """The batch that pieces are parts of."""

    num_samples: int
    num_terms: Any


class TrainingStep:
    """Call ``training_step`` on a batch or a piece of one, inside the precision's contexts.

    Args:
        trainer: whose fit has begun.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.module = trainer.lightning_module
        self.metrics = Metrics(self.module)
        self.logged = LoggedValues(self.module, self.metrics)
        self.loggers = StepLoggers(trainer)
        self.divisor = 1.0
        """What losses are divided by, as Lightning does with the batches of an update."""
        self.batch_index = 0
        self.count: Count | None = None
        """Counts the terms that the loss is a mean of; None where that is the samples."""
        self.labels_seen: LabelsSeen | None = None
        """Told of the labels of losses, where they are looked for."""
        self.reference: Any = None
        """The batch that pieces are parts of while none of the training is run."""
        self._takes_index: bool | None = None
        self._whole: _Whole | None = None
        self._outputs: list[tuple[Any, int]] = []

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss.

        Raises:
            StepSkippedError: if there is none.
        """
        del model  # the module that the trainer has, in which stand-ins lie while it is recorded
        num_samples = num_rows(batch)
        self.metrics.is_whole = self._whole is not None and num_samples == self._whole.num_samples
        terms = None if self.count is None or self.metrics.is_whole else self.count(batch)
        counts = torch.is_grad_enabled() and self.metrics.counts
        loggers = self.loggers.of_forward(
            is_training=counts, is_first=not self._outputs, is_whole=self.metrics.is_whole
        )
        with ExitStack() as stack:
            stack.enter_context(loggers)
            stack.enter_context(self.logged.collecting())
            stack.enter_context(self.metrics.replaced())
            stack.enter_context(self.metrics.forward())
            stack.enter_context(self.logged.piece(num_samples, terms))
            stack.enter_context(inside_hook(self.module, HOOK))
            if self.labels_seen is not None:
                stack.enter_context(self.labels_seen.noting(batch))
            stack.enter_context(self.trainer.precision_plugin.train_step_context())
            output = self.module.training_step(*self._arguments(batch))
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None:
            msg = (
                "training_step returned None for the batch, or the piece of one, that is tried "
                "before training, so there is no loss to plan with. Return None only for batches "
                "that have to be skipped whole."
            )
            raise StepSkippedError(msg)
        if counts:
            self._outputs.append((self._kept(output), num_samples))
        loss = loss.reshape(()) if loss.numel() == 1 else loss
        if terms is not None:
            loss = self._weighted(loss, terms, num_samples)
        value: torch.Tensor = loss if self.divisor == 1 else loss / self.divisor
        return value

    @contextmanager
    def counting(self, batch: Any) -> Iterator[None]:
        """Run a batch of the training itself: metrics add up, outputs and logs are kept."""
        self.metrics.begin_batch()
        self.logged.begin_batch()
        self._outputs, self._whole = [], self._whole_of(batch)
        self.metrics.counts = True
        try:
            yield
        finally:
            self.metrics.counts = False

    @contextmanager
    def on_trial(self) -> Iterator[None]:
        """Run forwards that are no part of the batch under way."""
        before, self._whole = self._whole, None
        try:
            yield
        finally:
            self._whole = before

    def result(self, loss: torch.Tensor) -> dict[str, Any]:
        """Return what Lightning hands to ``on_train_batch_end``: the loss, and what came with it.

        Raises:
            StrategyError: if outputs of pieces cannot be put together.
        """
        outputs, self._outputs = self._outputs, []
        joined = {"loss": loss.detach().clone()}
        extras = [extra for extra, _ in outputs if extra]
        for name in extras[0] if extras else ():
            values = [(extra[name], samples) for extra, samples in outputs]
            joined[name] = _joined(name, values)
        return joined

    def _whole_of(self, batch: Any) -> _Whole:
        return _Whole(num_rows(batch), 1 if self.count is None else self.count(batch))

    def _weighted(self, loss: torch.Tensor, terms: Any, num_samples: int) -> torch.Tensor:
        """Have a piece count by its terms, where it would count by its samples."""
        whole = self._whole if self.metrics.counts else None
        if whole is None:
            whole = self._whole_of(self.reference)
        if self.metrics.counts and not int(terms):  # the mean of nothing is no number
            trained = [p.sum() * 0 for p in self.module.parameters() if p.requires_grad]
            return torch.stack(trained).sum().to(loss.dtype)
        # Whole numbers divided by one another would be a number in float32.
        share = torch.as_tensor(terms, device=loss.device).to(loss.dtype) / whole.num_terms
        weighted: torch.Tensor = loss * share * (whole.num_samples / num_samples)
        return weighted

    def _kept(self, output: Any) -> dict[str, Any]:
        """Keep what a step returned besides its loss."""
        if not isinstance(output, Mapping):
            return {}
        return {
            name: value.detach()
            if isinstance(value, torch.Tensor) and not self.metrics.is_whole
            else value
            for name, value in output.items()
            if name != "loss"
        }

    def _arguments(self, batch: Any) -> Sequence[Any]:
        if self._takes_index is None:  # what Lightning finds out anew for every batch
            build = self.trainer.fit_loop.epoch_loop._build_kwargs
            self._takes_index = len(build(OrderedDict(), batch, self.batch_index)) > 1
        return (batch, self.batch_index) if self._takes_index else (batch,)


def _joined(name: str, values: Sequence[tuple[Any, int]]) -> Any:
    """Put together one output of the pieces of a batch.

    Raises:
        StrategyError: if it is neither a row for each sample nor a number.
    """
    first, _ = values[0]
    if len(values) == 1:
        return first
    if all(isinstance(value, torch.Tensor) for value, _ in values):
        if all(value.dim() and value.shape[0] == count for value, count in values):
            return torch.cat([value for value, _ in values])
        total = sum(count for _, count in values)
        if not first.dim():
            return sum(value * (count / total) for value, count in values)
    if all(type(value) is type(first) and value == first for value, _ in values):
        return first
    reason = (
        f"training_step returns {name!r} as a {type(first).__name__}, and what the pieces of a "
        "batch return cannot be put together. Return a row for each sample, a number, or only "
        "the loss."
    )
    raise StrategyError("micro-batching", reason)


def job_of(step: TrainingStep, batch: Any) -> Job:
    """Describe the training of a trainer whose fit has begun as a job on its living objects.

    Args:
        step: of its module.
        batch: a real one, the largest that there is, where the step will see it.

    Raises:
        MemfitError: if it is a training that cannot be described so.
    """
    trainer: Any = step.trainer
    module: torch.nn.Module = step.module
    check_supported(trainer, module)
    # An update may change callbacks, and they are put back.
    base: Any = part_of(trainer, "callbacks").Callback
    callbacks = [
        each
        for each in trainer.callbacks
        if any(getattr(type(each), hook) is not getattr(base, hook) for hook in _HOOKS_OF_UPDATES)
        or any(hook in vars(each) for hook in _HOOKS_OF_UPDATES)
    ]
    optimizer = trainer.optimizers[0]

    def model(_also: Any = callbacks) -> torch.nn.Module:
        return module

    step.divisor, step.reference = float(trainer.accumulate_grad_batches), batch
    return Job(
        model=model,
        batch=Resized(batch),
        loss=step,
        optimizer=lambda _: optimizer,
        batch_size=num_rows(batch),
        name=type(module).__name__,
        order=StepOrder(
            keeps_gradients=True,
            num_batches=trainer.accumulate_grad_batches,
            before_update=_clipping(trainer, module),
        ),
    )


_HOOKS_OF_UPDATES = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
"""What Lightning calls of callbacks between the beginning of a batch and the end of its update."""


def _clipping(trainer: Any, module: Any) -> Callable[[torch.optim.Optimizer], None] | None:
    """Return what clips gradients as the trainer and the module have it; None if nothing does."""
    overridden = part_of(trainer, "utilities.model_helpers").is_overridden
    if not trainer.gradient_clip_val and not overridden("configure_gradient_clipping", module):
        return None

    def clip(optimizer: torch.optim.Optimizer) -> None:
        trainer.precision_plugin._clip_gradients(
            module, optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        )

    return clip


def _engine(strategy: str) -> str:
    """Say why a strategy of Lightning is refused, and what there is instead."""
    if "DeepSpeed" in strategy:
        return (
            f"under {strategy} an engine of its own cuts batches and steps. Micro-batches, "
            "checkpointing and offload are settings of its configuration; `memfit run` watches the "
            "training as it is"
        )
    return (
        f"under {strategy} parameters are sharded or moved by an engine of its own, which "
        "Lightning's loop hands no window to. memfit.predict counts a Job whose model function "
        "calls fully_shard, `memfit run` watches this training as it is, and DDPStrategy is "
        "planned"
    )


_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")


def check_supported(trainer: Any, module: Any) -> None:
    """Refuse trainings whose window is not Lightning's automatic optimization of one optimizer.

    Raises:
        MemfitError: with the reason and what there is instead.
    """
    reason = ""
    if not module.automatic_optimization:
        reason = (
            "the module optimizes by hand (automatic_optimization = False), so when it goes "
            "backward and steps is its own matter. Give a plan of what acts on the model alone: "
            "MemfitCallback(plan=...); `memfit run` watches all of it"
        )
    elif not any(kind.__name__ in _STRATEGIES for kind in type(trainer.strategy).__mro__) or (
        trainer.strategy.handles_gradient_accumulation
    ):
        reason = _engine(type(trainer.strategy).__name__)
    elif isinstance(trainer.optimizers[0], torch.optim.LBFGS):
        reason = "LBFGS runs its closure several times for one step"
    elif "dataloader_iter" in module.training_step.__code__.co_varnames[:3]:
        reason = "training_step takes the loader's iterator, not a batch"
    if reason:
        raise MemfitError(f"This training cannot be planned: {reason}.")
