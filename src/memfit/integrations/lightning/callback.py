"""The callback that fits a Lightning training into its memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from memfit.errors import MemfitError
from memfit.figures import Prediction
from memfit.integrations.batches import num_rows
from memfit.integrations.lightning.batches import largest_training_batch
from memfit.integrations.lightning.framework import callback_class
from memfit.integrations.lightning.loop import LoopSettings, PlannedLoop
from memfit.integrations.lightning.phases import trained
from memfit.integrations.lightning.planning import PlanningSettings, count_terms, plan_for
from memfit.integrations.lightning.training_step import Count, TrainingStep, check_supported, job_of
from memfit.journal.folder import CONTINUE, REFUSE
from memfit.journal.records import Ending, Event, OutOfMemoryEvent, RunFacts, StepRecord
from memfit.journal.sentences import event_sentence
from memfit.listeners.scalars import PREFIX, scalars
from memfit.observe.observer import LEAKS_FRACTION, StepObserver
from memfit.observe.peaks import peaks_on
from memfit.observe.starting import start_observing
from memfit.runtime.attach import Attached, attach
from memfit.session.storages import owned_tensors
from memfit.strategies.plan import Plan

_Callback: Any = callback_class()
_LOG = logging.getLogger("memfit")


class MemfitCallback(_Callback):  # type: ignore[misc]  # its package is chosen when it is imported
    """Plan a training when it begins, run its steps under the plan, and guard each update.

    The plan is made from the module, the trainer and the largest batch of the training data, on
    fake copies; nothing is changed by that. From then on each batch is cut as the plan says, and
    gradients, logged values, hooks, schedulers and checkpoints are those of the whole batch. An
    update that runs out of memory is undone and run again under the next smaller plan. Where other
    parameters are trained from some epoch on, the plan is made anew.

    Args:
        budget: bytes, or a size such as ``"2GiB"``; None means the memory of the device.
        allow: strategies, or classes of numerics, that may change the results.
        require: strategies that the plan must have.
        forbid: strategies that the plan may not have.
        plan: to run under, instead of one that is made here; a file's path or a Plan.
        device: from ``memfit devices``, whose memory and speed are planned for.
        guard: whether an update that runs out of memory is undone and run again.
        rehearse: whether the largest batch is tried, and undone, before the first one.
        exact_windows: whether the batches of ``accumulate_grad_batches`` count by their samples.
            Lightning counts all batches alike and divides a short last window by its full length;
            so does memfit unless this is set.
        worst_phase: whether to plan for the time when all parameters are trained, from the start.
        on_refusal: told why a training cannot be planned, which then runs as it is; None makes that
            an error.
        count: counts the terms that the loss is a mean of, ``(batch) -> int``, where that is not
            the samples. Labels that the loss ignores are found without it.
        find_leaks: whether to look for what keeps growing.
        folder: of the run's journal; None for none.
        earlier_run: what to do with a run that lies in the folder: ``refuse``, ``overwrite`` or
            ``continue``; None continues it if ``fit`` is given a checkpoint, and else refuses.

    Raises:
        MemfitError: when training begins, if the training cannot be planned, with the reason.
        NoPlanFitsError: when training begins, if no plan fits.
    """

    def __init__(
        self,
        budget: str | int | None = None,
        *,
        allow: Sequence[str] = (),
        require: Sequence[str] = (),
        forbid: Sequence[str] = (),
        plan: Plan | str | Path | None = None,
        device: str = "",
        guard: bool = True,
        rehearse: bool = True,
        exact_windows: bool = False,
        worst_phase: bool = False,
        on_refusal: Callable[[str], None] | None = None,
        count: Count | None = None,
        find_leaks: bool = False,
        folder: str | Path | None = None,
        earlier_run: str | None = None,
    ) -> None:
        super().__init__()
        self._wanted = PlanningSettings(
            budget=budget,
            allow=tuple(allow),
            require=tuple(require),
            forbid=tuple(forbid),
            device=device,
            worst_phase=worst_phase,
        )
        self._given = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
        self._settings = LoopSettings(guard=guard, exact_windows=exact_windows)
        self._on_refusal = on_refusal
        self._rehearses, self._count = rehearse, count
        self._finds_leaks, self._folder = find_leaks, folder
        self._earlier_run = earlier_run
        self._loop: PlannedLoop | None = None
        self._attached: Attached | None = None
        self._observer: StepObserver | None = None
        self._step: TrainingStep | None = None
        self._batch: Any = None
        self._trained: tuple[Any, ...] = ()
        self.num_plans = 0
        """How many plans were made or taken: one, and one more whenever others are trained."""
        self.events: list[Event] = []
        """What has happened: steps run again under smaller plans, leaks, drifts."""

    @property
    def plan(self) -> Plan | None:
        """Return the plan in force; None before training has begun."""
        if self._attached is not None:
            return self._attached.plan
        return None if self._loop is None else self._loop.plan

    @property
    def prediction(self) -> Prediction | None:
        """Return what an update is predicted to take under the plan."""
        return None if self.plan is None else self.plan.prediction

    @property
    def measured_peak_bytes(self) -> int | None:
        """Return the highest peak measured so far."""
        return None if self._observer is None else self._observer.peaks.highest_peak_bytes

    # --- What Lightning calls ---

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Plan, and take the place of the loop's batches."""
        if not pl_module.automatic_optimization and self._given is not None:
            self._attached = attach(pl_module, trainer.optimizers[0], self._given)
            return
        with self._refusing("the trainer is not planned"):
            self._start(trainer)

    @contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        """Have a training that cannot be planned go on as it is, where that is asked for."""
        try:
            yield
        except MemfitError as error:
            if self._on_refusal is None:
                raise
            self._end()
            self._loop = None
            self._on_refusal(f"{what}: {error}")

    def _start(self, trainer: Any) -> None:
        check_supported(trainer, trainer.lightning_module)
        self._loop, self._observer = None, None  # of an earlier fit
        self._step = TrainingStep(trainer)
        self._step.count = self._count
        self._batch = largest_training_batch(trainer)
        if self._batch is None:  # the data can be read once only: the first batch has to tell
            loop = trainer.fit_loop.epoch_loop.automatic_optimization
            loop.run = self._first_batch
            return
        self._begin(trainer)
        if self._rehearses and self._loop is not None and self._settings.guard:
            self._loop.rehearse(self._batch)
        self._batch = None if trainer.max_epochs == 1 else self._batch

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give everything back as it was."""
        del trainer, pl_module
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Note why training ended, and give everything back."""
        del trainer, pl_module
        if self._observer is not None:
            self._observer.failed(exception)
        self._end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give everything back, however training ended."""
        del trainer, pl_module, stage
        self._end()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Leave nothing of the plan in a checkpoint."""
        del trainer, pl_module
        if self._loop is not None:
            self._loop.clean_checkpoint(checkpoint)

    # --- Beginning and end ---

    def _first_batch(self, optimizer: Any, batch_idx: int, kwargs: Any) -> Any:
        """Plan with the first batch there is, and run it."""
        assert self._step is not None, "training has begun"
        trainer = self._step.trainer
        vars(trainer.fit_loop.epoch_loop.automatic_optimization).pop("run")
        self._batch = next(iter(kwargs.values()))
        with self._refusing("the trainer is not planned"):
            self._begin(trainer)
        return trainer.fit_loop.epoch_loop.automatic_optimization.run(optimizer, batch_idx, kwargs)

    def _begin(self, trainer: Any) -> None:
        """Plan, and begin to run under the plan."""
        assert self._step is not None, "training has begun"
        step = self._step
        job = job_of(step, self._batch)
        found = self._given
        if found is None:
            # One plan on all ranks, whose clocks and data may differ.
            found = trainer.strategy.broadcast(
                plan_for(step, job, self._wanted).unless_interrupted()
            )
        else:
            with step.metrics.replaced():
                count_terms(step, job)
        if self._observer is None:
            self._observer = self._made_observer(trainer, found)
        else:  # what is trained now takes other peaks, which have to be seen
            self._observer.peaks.begin_training()
        self._trained = trained(trainer)
        self.num_plans += 1
        self._loop = PlannedLoop(step, job, found, self._observer, self._settings)
        self._loop.on_other_phase = self._plan_anew
        self._loop.begin()

    def _plan_anew(self, batch: Any) -> bool:
        """Plan again where other parameters are trained than before; say whether that was so."""
        assert self._step is not None, "training has begun"
        trainer = self._step.trainer
        now = trained(trainer)
        if now == self._trained or self._loop is None:
            return False
        kept = self._batch
        if kept is None or num_rows(kept) < num_rows(batch):
            self._batch = batch
        self._loop.end()
        what = f"from epoch {trainer.current_epoch} on, when others are trained, there is no plan"
        with self._refusing(what):
            self._begin(trainer)
        return True

    def _made_observer(self, trainer: Any, plan: Plan) -> StepObserver:
        assert self._step is not None, "training has begun"
        module = self._step.module
        device_type = trainer.strategy.root_device.type
        observer = StepObserver(
            peaks_on(device_type, takes_timeline=self._folder is not None),
            owned=lambda batch: owned_tensors(module, trainer.optimizers[0], batch),
            leaks_fraction=LEAKS_FRACTION if self._finds_leaks else None,
        )
        listener = _LoggerListener(trainer)
        start_observing(
            observer,
            device_type,
            plan,
            folder=self._folder,
            listeners=[listener],
            earlier_run=self._earlier_run or (CONTINUE if trainer.ckpt_path else REFUSE),
        )
        observer.listen(self.events.append)
        return observer

    def _end(self) -> None:
        with ExitStack() as stack:
            if self._observer is not None:
                stack.callback(self._observer.close)
            if self._attached is not None:
                stack.callback(self._attached.detach)
            if self._loop is not None:
                stack.callback(self._loop.end)
        self._batch = None


class _LoggerListener:
    """Log what steps take below ``memory/``, as often as the trainer logs, and count events.

    Args:
        trainer: whose loggers.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._num_out_of_memory = 0

    def begin(self, facts: RunFacts) -> None:
        """Say what is run."""
        if self._trainer.is_global_zero:
            strategies = ", ".join(facts.strategies) or "as it is"
            _LOG.info("memfit runs the training under its plan: %s", strategies)

    def step(self, record: StepRecord) -> None:
        """Log the numbers of a step, where the trainer logs its own."""
        if record.step % max(1, self._trainer.log_every_n_steps) == 0:
            self._log(scalars(record, self._num_out_of_memory))

    def event(self, event: Event) -> None:
        """Say what happened, and mark the step in the loggers."""
        self._num_out_of_memory += isinstance(event, OutOfMemoryEvent)
        kind = type(event).__name__.removesuffix("Event").lower()
        if self._trainer.is_global_zero:
            _LOG.warning("memfit: %s", event_sentence(event))
        self._log({f"{PREFIX}event_{kind}": 1.0})

    def end(self, ending: Ending | None) -> None:
        """Do nothing: Lightning closes its loggers."""

    def _log(self, values: dict[str, float]) -> None:
        step = self._trainer.fit_loop.epoch_loop._batches_that_stepped
        for logger in self._trainer.loggers:
            logger.log_metrics(values, step=step)
