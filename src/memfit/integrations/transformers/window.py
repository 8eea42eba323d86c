"""Takes hold of a Trainer's windows for as long as a plan is in force."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from memfit.comparison.gradients import accumulate_gradients
from memfit.integrations.transformers.batches import batch_of, plain, rows_of
from memfit.integrations.transformers.evaluating import GuardedEvaluation
from memfit.integrations.transformers.steps import Kind, Part, TrainerSteps
from memfit.integrations.transformers.training_step import TrainingStep, torch_optimizer
from memfit.integrations.windows import PlannedWindows, as_without_a_plan, flags_of, set_flags
from memfit.job import Job
from memfit.observe.observer import StepObserver
from memfit.runtime.planned_steps import DoneStep
from memfit.session.batches import find_layout
from memfit.session.session import Session
from memfit.strategies.plan import Plan


class TrainerWindows(PlannedWindows[TrainerSteps]):
    """Run the windows of a trainer under a plan.

    The Trainer's own loop goes on; its batches, the norm of its gradients and its update are run
    here, each in attempts that are undone where they fail.

    Args:
        step: of the trainer.
        job: the training, as it is.
        plan: how.
        observer: measures steps.
        guards: whether a window that runs out of memory is undone and run again.
    """

    def __init__(
        self, step: TrainingStep, job: Job, plan: Plan, observer: StepObserver, *, guards: bool
    ) -> None:
        self._step, self._trainer = step, step.trainer
        session = self._session(job)
        self._flags = flags_of(session.optimizer.param_groups)
        steps = TrainerSteps(step, session, plan, observer=observer)
        super().__init__(steps, observer, guards=guards)
        self._evaluation = GuardedEvaluation(step, session, observer.event)
        self._num_parts = self._length = 0
        self._seconds = 0.0
        self._own_update: Callable[..., Any]
        self._undos: list[Callable[[], None]] = []

    def _session(self, job: Job) -> Session:
        scaler = self._trainer.accelerator.scaler
        return Session(
            job=job,
            device_type=self._trainer.args.device.type,
            layout=find_layout(job),
            model=self._trainer.model,
            optimizer=torch_optimizer(self._trainer),
            gradient_pass=accumulate_gradients,
            micro_batch_size=job.batch_size,
            stateful={} if scaler is None else {"gradient_scaler": scaler},
        )

    # --- Beginning and end ---

    def begin(self) -> None:
        """Take the place of what the Trainer's loop calls in a window."""
        trainer = self._trainer
        clip, norm = trainer._clip_grad_norm, trainer._get_grad_norm
        self._own_update = self._replace(trainer.optimizer, "step", self._update)
        self.steps.update = self._own_update
        self._replace(trainer, "training_step", self._training_step)
        self._replace(trainer, "_clip_grad_norm", lambda model: self._norm(lambda: clip(model)))
        self._replace(
            trainer,
            "_get_grad_norm",
            lambda model, grad_norm=None: (
                self._norm(lambda: norm(model))
                if grad_norm is None
                else norm(model, grad_norm=grad_norm)
            ),
        )
        save = trainer._save_checkpoint
        self._replace(trainer, "_save_checkpoint", self._with_own_flags(save))
        predict = trainer.prediction_step
        self._replace(trainer, "prediction_step", self._evaluation.guarding(predict))

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Set an attribute that end() takes away again; return what was called before."""
        before = getattr(owner, name)
        is_own = name in vars(owner)

        @wraps(before)  # schedulers look for their mark on an optimizer's step
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        def put_back() -> None:
            if is_own:
                setattr(owner, name, before)
            else:
                vars(owner).pop(name, None)

        setattr(owner, name, replaced)
        self._undos.append(put_back)
        return before  # type: ignore[no-any-return]  # a method of another framework

    def end(self) -> None:
        """Give the Trainer its own methods back, and take the plan off the model."""
        for undo in reversed(self._undos):
            undo()
        self._undos = []
        super().end()

    # --- What the Trainer's loop calls ---

    def begin_window(self, samples: Sequence[Any]) -> None:
        """Begin a window of some batches; one that was left early is forgotten."""
        self.steps.end_window()
        self.steps.batches = [plain(inputs) for inputs in samples]
        self._entry, self._length, self._seconds = None, len(samples), 0.0

    def _training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        del model  # the one that the trainer has
        done = self._run(Kind.PASS, batch_of(inputs, num_items_in_batch))
        self._step.logged.flush()
        return done.loss

    def _norm(self, function: Callable[[], Any]) -> Any:
        self.steps.norm = function
        if not self.steps.window:
            return function()
        self._run(Kind.NORM, None)
        return self.steps.found_norm

    def _update(self, *args: Any, **kwargs: Any) -> None:
        if not self.steps.window or args or kwargs:
            self._own_update(*args, **kwargs)
            return
        self._run(Kind.UPDATE, None)
        self._end_window()

    def _run(self, kind: Kind, batch: Any) -> DoneStep:
        """Run a part of the window.

        Raises:
            MemfitError: if it fits under no plan.
        """
        part = Part(self._num_parts, str(kind), self._length, batch)
        self._num_parts += 1
        with as_without_a_plan():
            done, seconds = self._run_part(part, self._trainer.state.global_step + 1)
        self._seconds += seconds
        return done

    def _end_window(self) -> None:
        self._log_window(self._seconds)
        window = [part.batch for part in self.steps.window if part.batch is not None]
        number = self._trainer.state.global_step + 1
        self._report_window(number, window, sum(map(rows_of, window)))

    # --- Rehearsal ---

    def rehearse(self, batch: Any, num_batches: int) -> None:
        """Try a window of the largest batch, find a plan under which it fits, undo all but that.

        Raises:
            OutOfMemoryAfterAllError: if it fits under no plan.
        """
        trainer, steps = self._trainer, self.steps
        norm = trainer.args.max_grad_norm or float("inf")
        steps.norm = lambda: trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), norm)
        kinds = [Kind.PASS] * min(2, num_batches)  # what the second takes, all later ones take
        for number, kind in enumerate((*kinds, Kind.NORM, Kind.UPDATE)):
            part = Part(-1 - number, str(kind), num_batches, batch if kind is Kind.PASS else None)
            steps.window.append(part)
            steps.snapshots.append(None)
        self._rehearse_window(trainer.state.global_step + 1)

    # --- Checkpoints ---

    def _with_own_flags(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Have the optimizer's groups say what they said before the plan, while they are saved."""

        @wraps(function)
        def saving(*args: Any, **kwargs: Any) -> Any:
            groups = self.steps.session.optimizer.param_groups
            planned = flags_of(groups)
            set_flags(groups, self._flags)
            try:
                return function(*args, **kwargs)
            finally:
                set_flags(groups, planned)

        return saving
