"""Plans and predicts for a trainer: inside its fit, or for one that has not begun."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from memfit.errors import MemfitError
from memfit.figures import Prediction
from memfit.integrations.labels import find_labels
from memfit.integrations.lightning.batches import largest_training_batch
from memfit.integrations.lightning.framework import callback_class
from memfit.integrations.lightning.muted_loggers import muted
from memfit.integrations.lightning.phases import all_trained
from memfit.integrations.lightning.training_step import TrainingStep, job_of
from memfit.integrations.offered import all_forbidden, refuse_required, with_reasons
from memfit.job import Job
from memfit.planner.planning import plan as plan_job
from memfit.planner.result.planning_result import PlanningResult
from memfit.planner.search.evaluation import Progress
from memfit.prediction.predict import predict as predict_job
from memfit.session.deterministic_draws import untouched_randomness
from memfit.strategies.plan import Plan

_NOT_OFFERED = {
    "allocator-settings": "it has to be set before the process starts; see `memfit run`.",
    "eight-bit-optimizer": (
        "it would put another optimizer in the place of the one that the trainer, its schedulers "
        "and its checkpoints hold. Return one with 8-bit states from configure_optimizers."
    ),
    "optimizer-offload": (
        "Lightning's checkpoints would hold states that are elsewhere. memfit.start offers it."
    ),
    "optimizer-in-backward": (
        "clipping, precision plugins and hooks before the step need all gradients at once. "
        "memfit.start offers it."
    ),
    "fp16": 'Lightning scales losses itself: Trainer(precision="16-mixed").',
    "pure-bf16": 'Lightning casts modules itself: Trainer(precision="bf16-true").',
}
"""What Lightning's loop has no seam for, and who does it instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningSettings:
    """What a plan is asked for; see ``memfit.plan``."""

    budget: str | int | None = None
    allow: Sequence[str] = ()
    require: Sequence[str] = ()
    forbid: Sequence[str] = ()
    device: str = ""
    worst_phase: bool = False
    others: tuple[tuple[str, Any], ...] = ()
    """Further arguments of ``memfit.plan``."""


def plan_for(
    step: TrainingStep, job: Job, wanted: PlanningSettings, progress: Progress | None = None
) -> PlanningResult:
    """Plan a training whose fit has begun; nothing of it is changed.

    Raises:
        NoPlanFitsError: if no plan fits.
        UsageError: if the budget or a name makes no sense.
    """
    device = wanted.device or device_of(step.trainer)
    refuse_required(wanted.require, _NOT_OFFERED, "Lightning")
    arguments: dict[str, Any] = {
        "device": device,
        "budget": wanted.budget,
        "allow": wanted.allow,
        "require": wanted.require,
        "forbid": all_forbidden(wanted.forbid, _NOT_OFFERED),
        "progress": progress,
        **dict(wanted.others),
    }
    with step.metrics.replaced():
        count_terms(step, job)
        if not wanted.worst_phase:
            return with_reasons(plan_job(job, **arguments), _NOT_OFFERED)
        with all_trained(job, step.module) as worst:
            found = plan_job(worst, **arguments)
        found = replace(found, prediction=predict_job(job, device=device, plan=found))
        return with_reasons(found, _NOT_OFFERED)


def count_terms(step: TrainingStep, job: Job) -> None:
    """Have pieces count by the labels that the loss does not ignore, where the batch has such.

    That pieces keep the results then is tried on the batch.
    """
    if step.count is None and job.batch_size > 1:
        step.count = find_labels(step, job)


def device_of(trainer: Any) -> str:
    """Name the device that a trainer computes on, as the catalogue does."""
    root = trainer.strategy.root_device
    if root.type == "cpu":
        return "cpu"
    msg = (
        f"The training runs on {root}: name its card with device=..., as `memfit devices` lists it."
    )
    raise MemfitError(msg)


def plan(trainer: Any, module: Any, data: Any = None, **wanted: Any) -> PlanningResult:
    """Plan a training that has not begun: ``fit`` is begun and left again before its first batch.

    Trainer, module and data are left as they were; loggers and other callbacks hear nothing.

    Args:
        trainer: of Lightning.
        module: to be trained.
        data: loaders or a data module, as ``fit`` takes them; None where the module has its own.
        **wanted: as ``memfit.plan`` takes them, and ``worst_phase`` as ``MemfitCallback`` does.

    Raises:
        NoPlanFitsError: if no plan fits.
        MemfitError: if the training cannot be planned, with the reason.
    """
    known = {name: wanted.pop(name) for name in _SETTINGS if name in wanted}
    progress = wanted.pop("progress", None)
    settings = PlanningSettings(**known, others=tuple(wanted.items()))
    found: PlanningResult = at_train_start(
        trainer, module, data, lambda step, job: plan_for(step, job, settings, progress)
    )
    return found


def predict(
    trainer: Any, module: Any, data: Any = None, *, plan: Plan | None = None, device: str = ""
) -> Prediction:
    """Predict an update of a training that has not begun, as ``plan`` plans one.

    Args:
        trainer: of Lightning.
        module: to be trained.
        data: loaders or a data module, as ``fit`` takes them.
        plan: under which it would run; None runs it as it is.
        device: a name from ``memfit devices``; by default the trainer's own.

    Raises:
        MemfitError: if the training cannot be predicted, with the reason.
    """

    def predicted(step: TrainingStep, job: Job) -> Prediction:
        with step.metrics.replaced():
            return predict_job(job, device=device or device_of(step.trainer), plan=plan)

    found: Prediction = at_train_start(trainer, module, data, predicted)
    return found


_SETTINGS = ("budget", "allow", "require", "forbid", "device", "worst_phase")


class _DoneError(BaseException):
    """Leave ``fit`` once there is an answer."""


def at_train_start(
    trainer: Any, module: Any, data: Any, asked: Callable[[TrainingStep, Job], Any]
) -> Any:
    """Begin a trainer's fit, ask something of its training, and leave it again."""
    answers: list[Any] = []
    base: Any = callback_class()

    class Asking(base):  # type: ignore[misc]  # its package is chosen here
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            del pl_module
            step = TrainingStep(trainer)
            batch = largest_training_batch(trainer)
            if batch is None:
                msg = (
                    "The training data can be read once only, so no batch can be looked at before "
                    "training. MemfitCallback plans with the first one."
                )
                raise MemfitError(msg)
            # Left to Lightning, an interruption would end the process.
            with suppress(KeyboardInterrupt):
                answers.append(asked(step, job_of(step, batch)))
            raise _DoneError

    with _only(trainer, Asking()), untouched_randomness():
        try:
            if any(kind.__name__ == "LightningDataModule" for kind in type(data).__mro__):
                trainer.fit(module, datamodule=data)
            else:
                trainer.fit(module, data)
        except _DoneError:
            if not answers:
                raise KeyboardInterrupt from None
            return answers[0]
    msg = "The trainer left fit before its first batch, so there is nothing to predict."
    raise MemfitError(msg)


@contextmanager
def _only(trainer: Any, callback: Any) -> Iterator[None]:
    """Have a trainer call one callback alone, log nothing and validate nothing before training."""
    before = trainer.callbacks, trainer.loggers, trainer.num_sanity_val_steps
    trainer.callbacks, trainer.num_sanity_val_steps = [callback], 0
    trainer.loggers = muted(trainer.loggers)
    try:
        yield
    finally:
        trainer.callbacks, trainer.loggers, trainer.num_sanity_val_steps = before
