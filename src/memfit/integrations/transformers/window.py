"""Takes hold of a Trainer's windows for as long as a plan is in force."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch

from memfit.comparison.gradients import accumulate_gradients
from memfit.errors import OutOfMemoryAfterAllError
from memfit.integrations.batches import num_rows, pieces_of
from memfit.integrations.transformers.batches import batch_of, plain, rows_of
from memfit.integrations.transformers.steps import Kind, Part, TrainerSteps
from memfit.integrations.transformers.training_step import TrainingStep, Weighting, torch_optimizer
from memfit.integrations.windows import PlannedWindows, as_without_a_plan, flags_of, set_flags
from memfit.job import Job
from memfit.journal.records import Event, OutOfMemoryEvent
from memfit.live_state.random_sources import RandomSourcesReader
from memfit.observe.observer import StepObserver
from memfit.observe.out_of_memory import is_out_of_memory
from memfit.runtime.evaluation import EVALUATION, joined
from memfit.runtime.planned_steps import DoneStep
from memfit.runtime.retry import free_memory
from memfit.session.batches import find_layout
from memfit.session.session import Session
from memfit.strategies.facts import known_separation
from memfit.strategies.plan import Plan

_IGNORED = -100


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
        self._evaluation = _GuardedEvaluation(step, session, observer.event)
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
        self._log_window(self._seconds)
        window = [part.batch for part in self.steps.window if part.batch is not None]
        number = self._trainer.state.global_step + 1
        self._report_window(number, window, sum(map(rows_of, window)))

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


class _GuardedEvaluation:
    """Run ``prediction_step`` on pieces of a batch that does not fit.

    Args:
        step: of the trainer.
        session: of its training, whose samples are known to be apart or not.
        on_event: is told where a batch did not fit.
    """

    def __init__(
        self, step: TrainingStep, session: Session, on_event: Callable[[Event], None]
    ) -> None:
        self._step, self._session, self._on_event = step, session, on_event
        self._most_samples: int | None = None
        """The largest piece that did not run out of memory; None while no batch has."""

    def guarding(self, predict: Callable[..., Any]) -> Callable[..., Any]:
        """Return a trainer's ``prediction_step`` that goes on with less."""

        def guarded(model: Any, inputs: Any, loss_only: bool, ignore_keys: Any = None) -> Any:
            def evaluate(piece: Any) -> Any:
                return predict(model, piece, loss_only, ignore_keys=ignore_keys)

            return self._evaluated(evaluate, inputs)

        return guarded

    def _evaluated(self, evaluate: Callable[[Any], Any], inputs: Any) -> Any:
        device_type = self._session.device_type
        states = RandomSourcesReader().here()
        while True:
            rows = num_rows(plain(inputs)) if self._most_samples else 0
            in_piece = self._most_samples or rows
            try:
                if rows <= in_piece:
                    return evaluate(inputs)
                return self._in_pieces(evaluate, plain(inputs), in_piece)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                cause = str(error).strip().partition("\n")[0]
            free_memory(device_type)
            states.put_back()
            self._halve(min(num_rows(plain(inputs)), self._most_samples or 2**63), cause)

    def _in_pieces(
        self, evaluate: Callable[[Any], Any], inputs: Mapping[str, Any], in_piece: int
    ) -> Any:
        found = [(evaluate(piece), piece) for piece in pieces_of(inputs, in_piece)]
        counts = [num_rows(piece) for _, piece in found]
        parts = [*zip(*(result for result, _ in found), strict=True)]
        losses = parts[0]
        weights = [self._weight(piece) for _, piece in found]
        whole = sum(weights) or 1
        loss = (
            None
            if losses[0] is None
            else sum(
                each * (weight / whole)
                for each, weight in zip(losses, weights, strict=True)
                if weight  # the mean of nothing is no number
            )
        )
        others = (
            None if values[0] is None else joined([*zip(values, counts, strict=True)])
            for values in parts[1:]
        )
        return (loss, *others)

    def _weight(self, piece: Mapping[str, Any]) -> float:
        """Return what a piece's loss counts: its labels where tokens are labelled."""
        labels = piece.get("labels")
        if not isinstance(labels, torch.Tensor) or labels.dim() < 2:
            return float(num_rows(piece))
        if labels.is_floating_point():
            return float(num_rows(piece))
        shifts = getattr(self._step.trainer, "_loss_shifts_labels", False)
        return float((labels[..., 1:] if shifts else labels).ne(_IGNORED).sum())

    def _halve(self, num_samples: int, cause: str) -> None:
        """Go on with pieces of half the size.

        Raises:
            OutOfMemoryAfterAllError: if that is not possible.
        """
        number = self._step.trainer.state.global_step
        before, after = (f"pieces({each})" for each in (num_samples, num_samples // 2))
        reason = self._obstacle(num_samples // 2)
        if reason:
            raise OutOfMemoryAfterAllError(number, [before], cause, reason)
        self._most_samples = num_samples // 2
        self._on_event(
            OutOfMemoryEvent(
                step=number,
                phase=EVALUATION,
                cause=cause,
                plan=(before,),
                next_plan=(after,),
                num_steps_repeated=0,
            )
        )

    def _obstacle(self, num_samples: int) -> str:
        """Say why the results of pieces may not make up that of the batch; empty if they do."""
        if num_samples < 1:
            return "a piece has one sample already."
        separation = known_separation(self._session)
        if separation is None or self._step.weighting is Weighting.LABELS:
            return ""
        found = separation.of(min(num_samples, separation.job.batch_size), given_statistics=True)
        return "" if found.is_settled else found.sentence
