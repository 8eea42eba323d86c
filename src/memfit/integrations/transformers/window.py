"""Takes hold of a Trainer's windows for as long as a plan is in force."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch

from memfit.comparison.gradients import accumulate_gradients
from memfit.errors import (
    JobFunctionError,
    MemfitError,
    MemfitWarning,
    OutOfMemoryAfterAllError,
)
from memfit.integrations.transformers.batches import batch_of, plain, rows_of
from memfit.integrations.transformers.evaluating import GuardedEvaluation
from memfit.integrations.transformers.steps import Kind, Part, TrainerSteps
from memfit.integrations.transformers.training_step import TrainingStep, torch_optimizer
from memfit.job import Job
from memfit.live_state import LiveState
from memfit.observe.observer import StepObserver
from memfit.runtime.guard.attempts import Attempts
from memfit.runtime.guard.guard import Guard, GuardSettings
from memfit.runtime.guard.ranks import ranks_here
from memfit.runtime.guard.step_entry import StepEntry
from memfit.runtime.planned_steps import DoneStep
from memfit.session.batches import find_layout
from memfit.session.reachable import roots_of
from memfit.session.session import Session
from memfit.strategies.plan import Plan

_FLAGS = ("fused", "foreach")
"""What a plan sets in the groups of an optimizer."""


class PlannedWindows:
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
        self._step, self._trainer, self._observer = step, step.trainer, observer
        session = self._session(job)
        self._flags = [_flags_of(group) for group in session.optimizer.param_groups]
        self.steps = TrainerSteps(step, session, plan, observer=observer)
        if self.steps.checks is not None:
            self.steps.checks.on_event = observer.event_of_next_step
        self.guard: Guard | None = None
        if guards:
            ranks = ranks_here()
            attempts = Attempts(self.steps, ranks)
            self.guard = Guard(self.steps, attempts, ranks, GuardSettings(), observer.event)
        self._evaluation = GuardedEvaluation(step, session, observer.event)
        self._entry: StepEntry | None = None
        self._live: LiveState | None = None
        self._num_parts = self._num_states = self._length = 0
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

    @property
    def plan(self) -> Plan:
        """Return the plan in force; a guard may have taken a smaller one."""
        return self.steps.plan

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
        self.steps.close()
        if self.guard is not None:
            self.guard.close()

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
        steps, number = self.steps, self._trainer.state.global_step + 1
        part = Part(self._num_parts, str(kind), self._length, batch)
        self._num_parts += 1
        is_first = not steps.window
        try:
            if self.guard is None:
                steps.take(part, None)
                return steps.attempt(steps.window)
            steps.take(part, None if is_first else self._snapshot())
            if is_first:
                self._entry = self.guard.begin(number)
            assert self._entry is not None, "a window has begun"
            done, seconds = self.guard.run(self._entry, steps.window, number)
        except JobFunctionError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None  # what the trainer raised, as without a plan
        self._seconds += seconds
        return done

    def _end_window(self) -> None:
        number = self._trainer.state.global_step + 1
        if self.guard is not None and self._entry is not None:
            self.guard.end(self._entry, self._seconds)
        self._entry = None
        states = sum(map(len, self.steps.session.optimizer.state.values()))
        if states != self._num_states:  # they are not to be copied before every part
            self._num_states, self._live = states, None
        window = [part.batch for part in self.steps.window if part.batch is not None]
        self._observer.end_step(
            number,
            window,
            plan=self.plan,
            num_samples=sum(map(rows_of, window)),
            micro_batch_size=self.steps.micro_batch_size,
        )
        self.steps.end_window()

    # --- Rehearsal ---

    def rehearse(self, batch: Any, num_batches: int) -> None:
        """Try a window of the largest batch, find a plan under which it fits, undo all but that.

        Raises:
            OutOfMemoryAfterAllError: if it fits under no plan.
        """
        assert self.guard is not None, "what is rehearsed has to be undone"
        trainer, steps = self._trainer, self.steps
        norm = trainer.args.max_grad_norm or float("inf")
        steps.norm = lambda: trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), norm)
        kinds = [Kind.PASS] * min(2, num_batches)  # what the second takes, all later ones take
        for number, kind in enumerate((*kinds, Kind.NORM, Kind.UPDATE)):
            part = Part(-1 - number, str(kind), num_batches, batch if kind is Kind.PASS else None)
            steps.window.append(part)
            steps.snapshots.append(None)
        try:
            self.guard.rehearse(steps.window, trainer.state.global_step + 1)
        except OutOfMemoryAfterAllError:
            raise
        except MemfitError as error:
            msg = f"{error} Training begins without it."
            warnings.warn(msg, MemfitWarning, stacklevel=2)
        finally:
            steps.end_window()

    def _snapshot(self) -> Any:
        """Keep what a later part of a window begins with, but for what the update changes."""
        if self._live is None:
            session = self.steps.session
            large: list[torch.Tensor] = [*session.model.parameters()]
            states = (s.values() for s in session.optimizer.state.values() if isinstance(s, dict))
            large += [each for state in states for each in state if torch.is_tensor(each)]
            self._live = LiveState(roots_of(session), leave_out=large)
        return self._live.snapshot()

    # --- Checkpoints ---

    def _with_own_flags(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Have the optimizer's groups say what they said before the plan, while they are saved."""

        @wraps(function)
        def saving(*args: Any, **kwargs: Any) -> Any:
            groups = self.steps.session.optimizer.param_groups
            planned = [_flags_of(group) for group in groups]
            _set(groups, self._flags)
            try:
                return function(*args, **kwargs)
            finally:
                _set(groups, planned)

        return saving


def _flags_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in _FLAGS if name in group}


def _set(groups: Any, flags: Any) -> None:
    for group, own in zip(groups, flags, strict=False):
        group.update(own)
