"""The Run: a job carried out under a plan, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.devices.spec import CPU, CUDA
from memfit.errors import DeviceUnavailableError
from memfit.job import Job
from memfit.journal.records import OutOfMemoryEvent
from memfit.runtime.gradients import accumulate_gradients
from memfit.runtime.guard import Guard
from memfit.runtime.monitor import StepMonitor
from memfit.runtime.planned_steps import PlannedSteps
from memfit.session.batches import BatchLayout, find_layout
from memfit.session.session import PhaseListener, Session, open_session
from memfit.strategies.plan import Plan

_IMPLEMENTATION_FLAGS = ("fused", "foreach")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step gave: the loss (a detached scalar) and what it took."""

    loss: torch.Tensor
    num_samples: int
    step_seconds: float
    measured_peak_bytes: int | None
    """The peak of this step; None where it was not measured."""
    predicted_peak_bytes: int | None


class Run:
    """Carry out a job's steps under a plan.

    Made by ``memfit.start``. ``model`` and ``optimizer`` are the live objects.
    """

    def __init__(
        self,
        session: Session,
        plan: Plan,
        *,
        phase_listener: PhaseListener | None = None,
        monitor: StepMonitor | None = None,
        is_guarded: bool = False,
    ) -> None:
        self._steps = PlannedSteps(session, plan, phase_listener=phase_listener, monitor=monitor)
        self._num_steps = 0
        self._guard = Guard(self._steps) if is_guarded else None

    @property
    def plan(self) -> Plan:
        """Give the plan that is in force; a guard may take a smaller one."""
        return self._steps.plan

    @property
    def model(self) -> torch.nn.Module:
        """Give the live model."""
        return self._steps.session.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Give the live optimizer."""
        return self._steps.session.optimizer

    @property
    def num_steps(self) -> int:
        """Count the steps done so far."""
        return self._num_steps

    @property
    def measured_peak_bytes(self) -> int | None:
        """Give the highest peak measured so far; None before the first measured step."""
        monitor = self._steps.monitor
        return None if monitor is None else monitor.highest_peak_bytes

    @property
    def events(self) -> Sequence[OutOfMemoryEvent]:
        """Give every time that a step ran out of memory and was carried out again."""
        return () if self._guard is None else tuple(self._guard.events)

    def step(self, batch: Any) -> StepResult:
        """Carry out one step: gradients of the mean loss over the batch, clip, optimizer step.

        Args:
            batch: a pytree of tensors laid out like the job's ``batch``; it may hold fewer samples.
                Tensors that are not on the run's device are moved there.
        """
        if self._guard is None:
            done = self._steps.attempt(batch)
        else:
            done = self._guard.step(batch, self._num_steps + 1)
        self._num_steps += 1
        prediction = self.plan.prediction
        return StepResult(
            loss=done.loss,
            num_samples=self._steps.session.layout.num_samples(batch),
            step_seconds=done.reading.step_seconds,
            measured_peak_bytes=done.reading.measured_peak_bytes,
            predicted_peak_bytes=prediction.peak_allocated_bytes if prediction else None,
        )

    def state_dict(self) -> dict[str, Any]:
        """Give what a checkpoint must keep: model, optimizer and number of steps."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "num_steps": self._num_steps,
            **{name: part.state_dict() for name, part in self._steps.session.stateful.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state given by ``state_dict``; the plan stays this run's own."""
        groups = self.optimizer.param_groups
        flags = [{key: group.get(key) for key in _IMPLEMENTATION_FLAGS} for group in groups]
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            for name, part in self._steps.session.stateful.items():
                if name in state:
                    part.load_state_dict(state[name])
            self._num_steps = int(state["num_steps"])
        finally:
            # The saved groups carry the implementation of the run that saved them.
            for group, own in zip(self.optimizer.param_groups, flags, strict=True):
                group.update((key, own[key]) for key in own if key in group)
            if self._guard is not None:
                self._guard.forget()

    def close(self) -> None:
        """Take the strategies off the model and the optimizer."""
        self._steps.close()
        if self._guard is not None:
            self._guard.close()


def start(
    job: Job, plan: Plan | None = None, *, device: str | None = None, guard: bool = False
) -> Run:
    """Build a job's model and optimizer here and get ready to carry out its steps under a plan.

    Args:
        job: what to train.
        plan: how; None carries the job out as it is.
        device: ``cpu`` or a CUDA device of this machine (``cuda``, ``cuda:1``); None takes the
            kind of device that the plan was made for.
        guard: whether a step that runs out of memory is undone and carried out again under the next
            plan of the ladder; see ``memfit.runtime.guard``.

    Raises:
        StrategyError: if a strategy of the plan cannot apply to the job.
        DeviceUnavailableError: if the device is not in this machine.
    """
    plan = plan or Plan()
    if device is None:
        device = CPU if plan.device == CPU else CUDA
    device_type = device.partition(":")[0]
    if device_type != "cpu" and not torch.cuda.is_available():
        raise DeviceUnavailableError(device, "torch sees no CUDA device")
    session = open_session(job, device_type, find_layout(job), accumulate_gradients)
    return Run(session, plan, monitor=StepMonitor(device_type), is_guarded=guard)


def open_plain_session(job: Job, device_type: str, layout: BatchLayout) -> Session:
    """Build a session that carries the job out as it is."""
    return open_session(job, device_type, layout, accumulate_gradients)
