"""Plans and predicts for a Trainer: inside its training, or for one that has not begun."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from memfit.errors import MemfitError
from memfit.figures import Prediction
from memfit.integrations.offered import all_forbidden, refuse_required, with_reasons
from memfit.integrations.transformers.batches import largest_training_batch
from memfit.integrations.transformers.supported import check_supported
from memfit.integrations.transformers.training_step import TrainingStep, job_of
from memfit.integrations.transformers.weighting import find_weighting
from memfit.job import Job
from memfit.live_state import LiveState
from memfit.planner.planning import plan as plan_job
from memfit.planner.result.planning_result import PlanningResult
from memfit.planner.search.evaluation import Progress
from memfit.prediction.predict import predict as predict_job
from memfit.session.deterministic_draws import untouched_randomness
from memfit.strategies.plan import Plan

_NOT_OFFERED = {
    "allocator-settings": "it has to be set before the process starts; see `memfit run`.",
    "eight-bit-optimizer": (
        "it would put another optimizer in the place of the one that the Trainer, its schedulers "
        'and its checkpoints hold: TrainingArguments(optim="adamw_bnb_8bit").'
    ),
    "optimizer-offload": (
        "the Trainer's checkpoints would hold states that are elsewhere. memfit.start offers it."
    ),
    "optimizer-in-backward": (
        "the Trainer takes the norm of all gradients at once. memfit.start offers it."
    ),
    "fp16": "the Trainer scales losses itself: TrainingArguments(fp16=True).",
    "pure-bf16": 'load the model so: from_pretrained(..., dtype="bfloat16").',
}
"""What the Trainer's loop has no seam for, and who does it instead."""
_SETTINGS = ("budget", "allow", "require", "forbid", "device")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningSettings:
    """What a plan is asked for; see ``memfit.plan``."""

    budget: str | int | None = None
    allow: Sequence[str] = ()
    require: Sequence[str] = ()
    forbid: Sequence[str] = ()
    device: str = ""
    others: tuple[tuple[str, Any], ...] = ()
    """Further arguments of ``memfit.plan``."""


def plan_for(
    step: TrainingStep, job: Job, wanted: PlanningSettings, progress: Progress | None = None
) -> PlanningResult:
    """Plan a training that has begun; nothing of it is changed.

    Raises:
        NoPlanFitsError: if no plan fits.
        UsageError: if the budget or a name makes no sense.
    """
    refuse_required(wanted.require, _NOT_OFFERED, "the Trainer")
    find_weighting(step, job)
    found = plan_job(
        job,
        device=wanted.device or device_of(step.trainer),
        budget=wanted.budget,
        allow=wanted.allow,
        require=wanted.require,
        forbid=all_forbidden(wanted.forbid, _NOT_OFFERED),
        progress=progress,
        **dict(wanted.others),
    )
    return with_reasons(found, _NOT_OFFERED)


def device_of(trainer: Any) -> str:
    """Name the device that a trainer computes on, as the catalogue does.

    Raises:
        MemfitError: if that is a card, whose name has to be given.
    """
    device = trainer.args.device
    if device.type == "cpu":
        return "cpu"
    msg = (
        f"The training runs on {device}: name its card with device=..., as `memfit devices` lists "
        "it."
    )
    raise MemfitError(msg)


def plan(trainer: Any, **wanted: Any) -> PlanningResult:
    """Plan a training that has not begun: ``train`` is begun and left before its first batch.

    The trainer is left as it was; its callbacks hear nothing.

    Args:
        trainer: of transformers, or of a class below.
        **wanted: as ``memfit.plan`` takes them.

    Raises:
        NoPlanFitsError: if no plan fits.
        MemfitError: if the training cannot be planned, with the reason.
    """
    known = {name: wanted.pop(name) for name in _SETTINGS if name in wanted}
    progress = wanted.pop("progress", None)
    settings = PlanningSettings(**known, others=tuple(wanted.items()))
    found: PlanningResult = at_train_begin(
        trainer, lambda step, job: plan_for(step, job, settings, progress)
    )
    return found


def predict(trainer: Any, *, plan: Plan | None = None, device: str = "") -> Prediction:
    """Predict an update of a training that has not begun, as ``plan`` plans one.

    Args:
        trainer: of transformers, or of a class below.
        plan: under which it would run; None runs it as it is.
        device: a name from ``memfit devices``; by default the trainer's own.

    Raises:
        MemfitError: if the training cannot be predicted, with the reason.
    """

    def predicted(step: TrainingStep, job: Job) -> Prediction:
        if plan is not None:
            find_weighting(step, job, plan)
        return predict_job(job, device=device or device_of(trainer), plan=plan)

    found: Prediction = at_train_begin(trainer, predicted)
    return found


class _DoneError(BaseException):
    """Leave ``train`` once there is an answer."""


def at_train_begin(trainer: Any, asked: Callable[[TrainingStep, Job], Any]) -> Any:
    """Begin a trainer's training, ask something of it, and leave it again.

    Raises:
        MemfitError: if it cannot be begun or described.
    """
    check_supported(trainer)
    answers: list[Any] = []

    def windows(*_: Any) -> Any:
        step = TrainingStep(trainer)
        inputs = largest_training_batch(trainer)
        if inputs is None:
            msg = (
                "The training data can be read once only, so no batch can be looked at before "
                "training. memfit.integrations.transformers.fit plans with the first one."
            )
            raise MemfitError(msg)
        answers.append(asked(step, job_of(step, inputs)))
        raise _DoneError

    with _left_as_it_was(trainer), suppress(_DoneError):
        trainer.callback_handler.callbacks = []
        trainer.get_batch_samples = windows
        trainer.train()
    if not answers:
        msg = "The trainer left train before its first batch, so there is nothing to predict."
        raise MemfitError(msg)
    return answers[0]


@contextmanager
def _left_as_it_was(trainer: Any) -> Iterator[None]:
    """Put back what the beginning of a training changes, and all random states."""
    model: torch.nn.Module = trainer.model
    handler = trainer.callback_handler
    of_handler = dict(vars(handler))
    tensors = [*model.parameters(), *model.buffers()]
    before = LiveState({"trainer": trainer}, leave_out=tensors).snapshot()
    with untouched_randomness():
        try:
            yield
        finally:
            before.restore()
            vars(handler).clear()
            vars(handler).update(of_handler)
