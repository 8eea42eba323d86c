"""Finds the steps and the phases of a run in a script that tells neither."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Self

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import TensorWeakRef

from memfit.script.after_steps import AfterSteps
from memfit.script.host_meter import HostMeter
from memfit.script.question import Span
from memfit.trace.events import Phase
from memfit.trace.recorder import Recorder
from memfit.virtual.loaders import Asked

LOAD, FIRST_STEP, STEADY_STEP = "load", "first step", "steady step"
EVALUATION, CHECKPOINT, OTHER = "evaluation", "checkpoint", "other"
LATER_TRAINING = "later training"
_STEPS = (FIRST_STEP, STEADY_STEP)
_MOST_EMPTY_LOADS = 1000
"""Times that a loop may ask for data that has ended, before it is taken to never stop asking."""


class EnoughRecordedError(BaseException):
    """End a script whose steps have been recorded; no script catches it by accident."""


class Timekeeper(Protocol):
    """What the steps of a script are told to, and what knows how far the run is."""

    def position(self) -> int:
        """Return a number that never falls."""
        ...

    def host_peak_bytes(self) -> int:
        """Return the highest bytes on the host since the last question."""
        ...

    def begin_step(self) -> None:
        """Hear that a step begins."""
        ...

    def end_step(self) -> object:
        """Hear that a step has ended."""
        ...


class TrainingData(Protocol):
    """What is told of steps and gives them batches after those that were asked for."""

    is_finished: bool

    def saw(self, inputs: object) -> None:
        """Hear what a module is called with in training."""
        ...

    def updated(self, *, is_enough: bool, has_loader: bool) -> None:
        """Hear that a step was recorded."""
        ...


class RecordedTime:
    """Count in events of a recorder."""

    def __init__(self, recorder: Recorder, host: HostMeter) -> None:
        self._recorder = recorder
        self.end_step = recorder.end_step
        self.host_peak_bytes = host.take_peak

    def position(self) -> int:
        """Return how many events there are."""
        return len(self._recorder.history.events)

    def begin_step(self) -> None:
        """Have the recorder begin a step, with its forward."""
        self._recorder.begin_step()
        self._recorder.enter_phase(Phase.FORWARD)


class StepCounter:
    """Cut a recorded script into steps and phases, and end it when there is enough.

    A step ends with the update of the first optimizer that makes one. It begins where the one
    before ended, or with the next forward in training mode after an evaluation or a checkpoint.
    An evaluation begins with a forward without gradients of a model in evaluation mode. What is
    saved before the first update is part of loading. Once the steps are there, training data is
    told to have ended, so that the script goes on to what it does after an epoch. Steps of an
    optimizer that makes its first update after them are a later training.

    Args:
        timekeeper: is told of steps.
        num_steps: how many updates are recorded.
        most_seconds: after which the script ends with what there is.
        data: gives further batches, whose steps are recorded until it has no more.
    """

    def __init__(
        self,
        timekeeper: Timekeeper,
        num_steps: int,
        most_seconds: float,
        data: TrainingData | None = None,
    ) -> None:
        self._time = timekeeper
        self._data = data
        self._num_steps = num_steps
        self._ends_at = time.perf_counter() + most_seconds
        # To hold an optimizer would keep its states in memory after the script has dropped them.
        self._first: weakref.ref[torch.optim.Optimizer] | None = None
        self._phase = LOAD
        self._began = 0
        self._handles: list[Any] = []
        self._after = AfterSteps()
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._trained: dict[int, TensorWeakRef] = {}
        self._are_trained: dict[int, bool] = {}
        self._fetched_from: object = None
        self._training_data: list[object] = []
        self._num_empty_loads = 0
        self._num_spans_of_load = 0
        self.num_done = 0
        self.was_late = False
        """Whether the time was over."""
        self.spans: list[Span] = []
        """The phases of the run so far, in order."""
        self.when_enough: Callable[[], object] = _nothing
        """Called once when all the steps are there, and the script goes on."""

    def __enter__(self) -> Self:
        self._handles = [
            register_optimizer_step_post_hook(self._updated),
            register_module_forward_pre_hook(self._forwards),
        ]
        return self

    def __exit__(self, *exc_info: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._turn_to(OTHER)

    @property
    def has_steps(self) -> bool:
        """Return whether all the steps are there."""
        return self.num_done >= self._num_steps and (self._data is None or self._data.is_finished)

    @property
    def has_seen_all(self) -> bool:
        """Return whether an evaluation and a checkpoint came after the steps."""
        return self._after.has_seen_all

    def may_be_given(self, source: object) -> bool:
        """Return whether a loader reads training data, after the steps that were asked for."""
        is_enough = self.num_done >= self._num_steps
        return is_enough and torch.is_grad_enabled() and self._trains_on(source)

    def allow_more_seconds(self, seconds: float) -> None:
        """Leave out of the script's time what was spent on something else."""
        self._ends_at += seconds

    def ends_epoch(self) -> bool:
        """Return whether an epoch ends with the batch that was just trained on."""
        if self.has_steps:
            self._after.cut_short()
        return self.has_steps

    def notes(self) -> tuple[str, ...]:
        """Say what the figures of phases rest on, where that is less than in a real run."""
        after = {span.phase for span in self.spans[self._num_spans_of_load :]}
        seen = [phase for phase in (EVALUATION, CHECKPOINT) if phase in after]
        notes = self._after.notes(self.num_done, seen)
        if self.was_late and self._phase == EVALUATION:
            notes += ("The time was over before the evaluation was: later batches are not in it",)
        return notes

    def missing(self) -> Sequence[str]:
        """Return the phases that were not reached."""
        seen = {span.phase for span in self.spans} | {self._phase}
        return [phase for phase in (EVALUATION, CHECKPOINT) if phase not in seen]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Take what happens inside for a checkpoint."""
        if self._phase == CHECKPOINT or self.num_done == 0:
            yield
            return
        self._turn_to(CHECKPOINT)
        try:
            yield
        finally:
            self._turn_to(OTHER)

    def may_fetch(self, asked: Asked) -> bool:
        """Return whether a loader may give another batch; after the steps, training data has ended.

        Args:
            asked: what the script asks for.
        """
        self._stop_if_late()
        source = asked.source
        # What is read without gradients is evaluated, and training may follow from other data.
        trains = torch.is_grad_enabled() and self._trains_on(source)
        if not self.has_steps or not trains:
            self._fetched_from = source if torch.is_grad_enabled() else None
            return True
        self.stop_if_enough()
        if self._after.may_give(asked):
            return True
        self._num_empty_loads += 1
        if self._num_empty_loads > _MOST_EMPTY_LOADS:
            raise EnoughRecordedError
        return False

    def stop_if_enough(self) -> None:
        """End the script some time after an evaluation and a checkpoint came after its steps.

        An evaluation before the steps lacks what they leave.
        """
        if not self.has_steps:
            return
        after = {span.phase for span in self.spans[self._num_spans_of_load :]} | {self._phase}
        if after >= {EVALUATION, CHECKPOINT}:
            self._after.see_all()

    def function_ended(self) -> None:
        """Take the end of a function that does one step for its update, if it made none."""
        if self._first is None:
            self._step_ends()

    def _updated(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._first = self._first or weakref.ref(optimizer)
        self._are_trained.clear()
        for group in optimizer.param_groups:
            for each in group["params"]:
                if not self._has_trained(each):
                    self._trained[id(each)] = TensorWeakRef(each)
        if optimizer is self._first():
            self._step_ends()
        else:
            self._other_step_ends(optimizer)

    def _other_step_ends(self, optimizer: torch.optim.Optimizer) -> None:
        """Take an update of another optimizer for a step, if it makes its first after the steps."""
        if any(optimizer is each() for each in self._optimizers):
            return
        if not self.has_steps:
            self._optimizers.append(weakref.ref(optimizer))
            return
        self._stop_if_late()
        self._note_training_data()
        if self._phase in _STEPS:
            self._phase = LATER_TRAINING
            self._turn_to(STEADY_STEP)

    def _step_ends(self) -> None:
        if self.has_steps:
            self._stop_if_late()
            if not self._after.may_step():
                raise EnoughRecordedError  # a loop that does not get its data from a loader
            return
        self._time.end_step()
        self._turn_to("")
        if self.num_done == 0:
            self._num_spans_of_load = len(self.spans)
        self.num_done += 1
        self._note_training_data()
        if self._data is not None:
            is_enough = self.num_done >= self._num_steps
            self._data.updated(is_enough=is_enough, has_loader=bool(self._training_data))
        self.stop_if_enough()
        if self.num_done == self._num_steps:
            self.when_enough()
        if self.has_steps:
            self._after.begin()
        self._begin_step()

    def _trains_on(self, source: object) -> bool:
        return any(source is each for each in self._training_data)

    def _note_training_data(self) -> None:
        source = self._fetched_from
        if source is not None and not self._trains_on(source):
            self._training_data.append(source)

    def _begin_step(self) -> None:
        self._turn_to(FIRST_STEP if self.num_done == 0 else STEADY_STEP)
        self._time.begin_step()

    def _forwards(self, module: torch.nn.Module, inputs: object) -> None:
        self._stop_if_late()
        if torch.is_grad_enabled():
            if self._data is not None:
                self._data.saw(inputs)
            # A model that is left in evaluation mode trains all the same.
            begins = module.training or self._phase != EVALUATION
            if begins and self._phase not in _STEPS:
                self.stop_if_enough()
                self._begin_step()
        elif self._phase != EVALUATION and not module.training and self._is_trained(module):
            self._turn_to(EVALUATION)

    def _stop_if_late(self) -> None:
        self.was_late = time.perf_counter() > self._ends_at
        if self.was_late or self._after.is_over:
            raise EnoughRecordedError

    def _is_trained(self, module: torch.nn.Module) -> bool:
        """Return whether a module is what is trained: a frozen teacher is no evaluation."""
        if not self._trained:
            return True
        known = self._are_trained.get(id(module))
        if known is None:
            parameters = list(module.parameters())
            # A teacher that was trained before is frozen when it teaches.
            known = any(each.requires_grad and self._has_trained(each) for each in parameters)
            self._are_trained[id(module)] = known
        return known

    def _has_trained(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter was updated, and not another one that lay in its place."""
        found = self._trained.get(id(parameter))
        return found is not None and found() is parameter

    def _turn_to(self, phase: str) -> None:
        """End a phase of the run and begin another."""
        here = self._time.position()
        if self._phase == CHECKPOINT or (self._phase and here > self._began):
            span = Span(
                # A step that ends without an update was none.
                phase=OTHER if self._phase in _STEPS and phase else self._phase,
                first_event=self._began,
                last_event=here,
                host_peak_bytes=self._time.host_peak_bytes(),
            )
            self.spans.append(span)
        self._phase, self._began = phase, here


def _nothing() -> None:
    """Do nothing."""
