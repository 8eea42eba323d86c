"""Has a ready Trainer train under a plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from memfit.errors import MemfitError
from memfit.figures import Prediction
from memfit.integrations.transformers.batches import (
    largest_of,
    largest_training_batch,
    plain,
)
from memfit.integrations.transformers.planning import PlanningSettings, plan_for
from memfit.integrations.transformers.supported import check_is_trainer, check_supported
from memfit.integrations.transformers.training_step import TrainingStep, job_of, torch_optimizer
from memfit.integrations.transformers.weighting import find_weighting
from memfit.integrations.transformers.window import TrainerWindows
from memfit.journal.records import Ending, Event, OutOfMemoryEvent, RunFacts, StepRecord
from memfit.journal.sentences import event_sentence
from memfit.listeners.scalars import scalars
from memfit.observe.observer import LEAKS_FRACTION, StepObserver
from memfit.observe.out_of_memory import is_out_of_memory
from memfit.observe.peaks import peaks_on
from memfit.observe.starting import start_observing
from memfit.session.storages import owned_tensors
from memfit.strategies.plan import Plan

_ATTRIBUTE = "_memfit"
_LOG = logging.getLogger("memfit")


class AttachedTrainer:
    """Plan a training at its first window, and run its windows under the plan; made by ``attach``.

    Args:
        trainer: of transformers, or of a class below.
        wanted: what a plan is asked for.
        plan: to run under, instead of one that is made here.
        guard: whether a window that runs out of memory is undone and run again.
        rehearse: whether the largest batch is tried, and undone, before the first window.
        find_leaks: whether to look for what keeps growing.
        folder: of the run's journal; None for none.
        on_refusal: told why a training cannot be planned, which then runs as it is; None makes that
            an error.
    """

    def __init__(
        self,
        trainer: Any,
        wanted: PlanningSettings,
        *,
        plan: Plan | None,
        guard: bool,
        rehearse: bool,
        find_leaks: bool,
        folder: str | Path | None,
        on_refusal: Callable[[str], None] | None,
    ) -> None:
        self._trainer, self._wanted, self._given = trainer, wanted, plan
        self._guards, self._rehearses = guard, rehearse
        self._finds_leaks, self._folder, self._on_refusal = find_leaks, folder, on_refusal
        self._windows: TrainerWindows | None = None
        self._observer: StepObserver | None = None
        self._step: TrainingStep | None = None
        self._inputs: Any = None
        self._trained: tuple[bool, ...] = ()
        self._is_refused = False
        self._last: tuple[Plan, int | None] | None = None
        self.num_plans = 0
        """How many plans were made or taken: one, and one more whenever others are trained."""
        self.events: list[Event] = []
        """What has happened: windows run again under smaller plans, leaks, drifts."""
        self._get, self._loop = trainer.get_batch_samples, trainer._inner_training_loop
        trainer.get_batch_samples, trainer._inner_training_loop = self._window, self._train
        setattr(trainer, _ATTRIBUTE, self)

    @property
    def plan(self) -> Plan | None:
        """Return the plan in force, or the last one; None before training has begun."""
        if self._windows is not None:
            return self._windows.plan
        return None if self._last is None else self._last[0]

    @property
    def prediction(self) -> Prediction | None:
        """Return what an update is predicted to take under the plan."""
        return None if self.plan is None else self.plan.prediction

    @property
    def measured_peak_bytes(self) -> int | None:
        """Return the highest peak measured so far."""
        if self._observer is not None:
            return self._observer.peaks.highest_peak_bytes
        return None if self._last is None else self._last[1]

    def detach(self) -> None:
        """Give the trainer its own methods back."""
        self._end()
        for name in ("get_batch_samples", "_inner_training_loop", _ATTRIBUTE):
            vars(self._trainer).pop(name, None)

    # --- What the Trainer calls ---

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and leave the trainer as it was however that ends.

        Raises:
            MemfitError: if memory runs out where nothing can be undone; the Trainer would halve the
                batch and start over where ``auto_find_batch_size`` is set.
        """
        try:
            return self._loop(*args, **kwargs)
        except Exception as error:
            if self._observer is not None:
                self._observer.failed(error)
            if self._is_refused or isinstance(error, MemfitError) or not is_out_of_memory(error):
                raise
            msg = (
                f"Memory ran out outside of a window, where nothing is undone: {error}. Give a "
                "smaller budget, so that there is room for what lies around the steps."
            )
            raise MemfitError(msg) from error
        finally:
            self._end()

    def _window(self, iterator: Any, num_batches: int, device: Any) -> Any:
        """Get the batches of a window, as the Trainer does; plan before the first one."""
        samples, num_items = self._get(iterator, num_batches, device)
        if samples and not self._is_refused:
            try:
                self._plan_if_due(samples)
            except MemfitError as error:
                self._end()
                if self._on_refusal is None:
                    raise
                self._is_refused = True
                self._on_refusal(f"the trainer is not planned: {error}")
        if self._windows is not None:
            self._windows.begin_window(samples)
        return samples, num_items

    # --- Planning ---

    def _plan_if_due(self, samples: Sequence[Any]) -> None:
        """Plan before the first window, and where other parameters are trained than before."""
        now = tuple(each.requires_grad for each in self._trainer.model.parameters())
        if self._windows is not None and now == self._trained:
            return
        is_first = self._windows is None
        length = self._trainer.args.gradient_accumulation_steps
        if is_first:
            check_supported(self._trainer)
            inputs = largest_training_batch(self._trainer)
            self._inputs = plain(largest_of(samples)) if inputs is None else inputs
        else:
            assert self._windows is not None, "it was planned before"
            self._windows.end()
        self._begin()
        self._trained = now
        if is_first and self._rehearses and self._guards and self._windows is not None:
            assert self._step is not None, "it was planned"
            self._windows.rehearse(self._step.reference, length)

    def _begin(self) -> None:
        trainer = self._trainer
        length = trainer.current_gradient_accumulation_steps if self.num_plans else 1
        self._step = TrainingStep(trainer)
        job = job_of(self._step, self._inputs)
        found = self._given
        if found is None:
            found = plan_for(self._step, job, self._wanted).unless_interrupted()
        else:
            find_weighting(self._step, job, found)
        trainer.current_gradient_accumulation_steps = length
        if self._observer is None:
            self._observer = self._made_observer(found)
        self.num_plans += 1
        self._windows = TrainerWindows(self._step, job, found, self._observer, guards=self._guards)
        self._windows.begin()

    def _made_observer(self, plan: Plan) -> StepObserver:
        trainer = self._trainer
        device_type = trainer.args.device.type
        observer = StepObserver(
            peaks_on(device_type, takes_timeline=self._folder is not None),
            owned=partial(owned_tensors, trainer.model, torch_optimizer(trainer)),
            leaks_fraction=LEAKS_FRACTION if self._finds_leaks else None,
        )
        listener = _TrainerListener()
        start_observing(observer, device_type, plan, folder=self._folder, listeners=[listener])
        observer.listen(self.events.append)
        return observer

    def _end(self) -> None:
        windows, observer = self._windows, self._observer
        if windows is not None:
            peak = None if observer is None else observer.peaks.highest_peak_bytes
            self._last = windows.plan, peak
        with ExitStack() as stack:
            if observer is not None:
                stack.callback(observer.close)
            if windows is not None:
                stack.callback(windows.end)
        self._windows = self._observer = self._inputs = None


def attach(
    trainer: Any,
    budget: str | int | None = None,
    *,
    allow: Sequence[str] = (),
    require: Sequence[str] = (),
    forbid: Sequence[str] = (),
    plan: Plan | str | Path | None = None,
    device: str = "",
    guard: bool = True,
    rehearse: bool = True,
    find_leaks: bool = False,
    folder: str | Path | None = None,
    on_refusal: Callable[[str], None] | None = None,
) -> AttachedTrainer:
    """Have a ready Trainer plan when its training begins, and train under the plan.

    ``trainer.train()`` is called as ever. The plan is made from model, optimizer and the largest
    batch of the training data, on fake copies; nothing is changed by that. From then on each batch
    is cut as the plan says, and gradients, logs, callbacks, schedules and checkpoints are those of
    the whole batch. A window that runs out of memory is undone and run again under the next smaller
    plan, so that ``auto_find_batch_size`` has nothing left to do.

    Args:
        trainer: of transformers, or of a class below such as TRL's SFTTrainer.
        budget: bytes, or a size such as ``"2GiB"``; None means the memory of the device.
        allow: strategies, or classes of numerics, that may change the results.
        require: strategies that the plan must have.
        forbid: strategies that the plan may not have.
        plan: to run under, instead of one that is made here; a file's path or a Plan.
        device: from ``memfit devices``, whose memory and speed are planned for.
        guard: whether a window that runs out of memory is undone and run again.
        rehearse: whether the largest batch is tried, and undone, before the first window.
        find_leaks: whether to look for what keeps growing.
        folder: of the run's journal; None for none.
        on_refusal: told why a training cannot be planned, which then runs as it is; None makes that
            an error when training begins.

    Returns:
        What has the plan, its prediction, the measured peak and what happened.

    Raises:
        MemfitError: if it is no Trainer.
    """
    check_is_trainer(trainer)
    before = vars(trainer).get(_ATTRIBUTE)
    if before is not None:
        before.detach()
    wanted = PlanningSettings(
        budget=budget,
        allow=tuple(allow),
        require=tuple(require),
        forbid=tuple(forbid),
        device=device,
    )
    return AttachedTrainer(
        trainer,
        wanted,
        plan=Plan.load(plan) if isinstance(plan, (str, Path)) else plan,
        guard=guard,
        rehearse=rehearse,
        find_leaks=find_leaks,
        folder=folder,
        on_refusal=on_refusal,
    )


def is_attached(trainer: Any) -> bool:
    """Return whether a trainer trains under a plan already."""
    return vars(trainer).get(_ATTRIBUTE) is not None


def fit(
    trainer: Any,
    budget: str | int | None = None,
    *,
    resume_from_checkpoint: str | bool | None = None,
    **wanted: Any,
) -> Any:
    """Train a ready Trainer inside a budget, and give what its ``train`` gives.

    Args:
        trainer: of transformers, or of a class below.
        budget: bytes, or a size such as ``"2GiB"``; None means the memory of the device.
        resume_from_checkpoint: as ``train`` takes it.
        **wanted: as ``attach`` takes them.

    Raises:
        MemfitError: if the training cannot be planned, with the reason.
    """
    attached = attach(trainer, budget, **wanted)
    try:
        return trainer.train(resume_from_checkpoint=resume_from_checkpoint)
    finally:
        attached.detach()


class MemfitTrainerMixin:
    """Have a class of Trainers train under a plan: ``class Fitted(MemfitTrainerMixin, Trainer)``.

    Its constructor takes what the Trainer's takes, and ``memfit``, what ``attach`` takes by name.
    """

    memfit: AttachedTrainer
    """What has the plan and what happened."""

    def __init__(self, *args: Any, memfit: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.memfit = attach(self, **(memfit or {}))


class _TrainerListener:
    """Say what happens, and hand what steps take to the trainer's callbacks."""

    def __init__(self) -> None:
        self._num_out_of_memory = 0
        self.values: dict[str, float] = {}
        """What the latest step took, for the trainer's next log."""

    def begin(self, facts: RunFacts) -> None:
        """Say what is run."""
        strategies = ", ".join(facts.strategies) or "as it is"
        _LOG.info("memfit runs the training under its plan: %s", strategies)

    def step(self, record: StepRecord) -> None:
        """Keep the numbers of a step."""
        self.values = scalars(record, self._num_out_of_memory)

    def event(self, event: Event) -> None:
        """Say what happened."""
        self._num_out_of_memory += isinstance(event, OutOfMemoryEvent)
        _LOG.warning("memfit: %s", event_sentence(event))

    def end(self, ending: Ending | None) -> None:
        """Do nothing: the Trainer closes its loggers."""
