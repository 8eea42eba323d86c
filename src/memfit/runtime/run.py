"""The Run: a job carried out under a plan, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from memfit.devices.spec import CPU, CUDA
from memfit.errors import DeviceUnavailableError, StrategyError
from memfit.job import Job
from memfit.runtime.gradients import accumulate_gradients
from memfit.runtime.guard import Guard, OutOfMemoryEvent
from memfit.runtime.ladder import smaller_plans
from memfit.runtime.monitor import StepMonitor, StepReading
from memfit.session.batches import BatchLayout, find_layout
from memfit.session.facts import gather_facts
from memfit.session.session import PhaseListener, Session, open_session
from memfit.strategies.base import Strategy, Undo
from memfit.strategies.plan import Plan, conflict, in_catalogue_order
from memfit.trace.events import Phase

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """What one attempt at a step gave."""

    loss: torch.Tensor
    reading: StepReading


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
        self.plan = plan
        self.session = session
        self._listener = phase_listener or _ignore_phase
        self._monitor = monitor
        self._num_steps = 0
        self._undos = apply_strategies(session, plan.strategies)
        session.optimizer.zero_grad(set_to_none=True)
        self._guard: Guard[_Attempt] | None = Guard(self) if is_guarded else None

    @property
    def model(self) -> torch.nn.Module:
        """Give the live model."""
        return self.session.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Give the live optimizer."""
        return self.session.optimizer

    @property
    def num_steps(self) -> int:
        """Count the steps done so far."""
        return self._num_steps

    @property
    def measured_peak_bytes(self) -> int | None:
        """Give the highest peak measured so far; None before the first measured step."""
        return None if self._monitor is None else self._monitor.highest_peak_bytes

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
            done = self.attempt(batch)
        else:
            done = self._guard.step(batch, self._num_steps + 1)
        self._num_steps += 1
        prediction = self.plan.prediction
        return StepResult(
            loss=done.loss,
            num_samples=self.session.layout.num_samples(batch),
            step_seconds=done.reading.step_seconds,
            measured_peak_bytes=done.reading.measured_peak_bytes,
            predicted_peak_bytes=prediction.peak_allocated_bytes if prediction else None,
        )

    def attempt(self, batch: Any) -> _Attempt:
        """Carry out one step, without a guard; the count of steps stays."""
        batch = self._on_device(batch)
        with self._observing(batch) as reading:
            loss = self._carry_out(batch)
        return _Attempt(loss=loss, reading=reading)

    def labels(self) -> tuple[str, ...]:
        """Write the strategies of the plan that is in force."""
        return self.plan.labels()

    def take_smaller_plan(self) -> None:
        """Go on with the next plan of the ladder, or with half the micro-batch.

        Raises:
            StrategyError: if there is nothing smaller that keeps the results, with the reason.
        """
        for plan in smaller_plans(self.plan, self.session):
            try:
                self._change_plan(plan)
            except StrategyError:
                continue
            return
        raise StrategyError("ladder", "none of its plans can be applied here.")

    def _change_plan(self, plan: Plan) -> None:
        """Carry out the steps to come under another plan; on an error the old one stays.

        Raises:
            StrategyError: if a strategy of the plan cannot apply.
        """
        self._undo_strategies()
        try:
            self._undos = apply_strategies(self.session, plan.strategies)
        except StrategyError:
            self._undos = apply_strategies(self.session, self.plan.strategies)
            raise
        self.plan = plan

    def state_dict(self) -> dict[str, Any]:
        """Give what a checkpoint must keep: model, optimizer and number of steps."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "num_steps": self._num_steps,
            **{name: part.state_dict() for name, part in self.session.stateful.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state given by ``state_dict``; the plan stays this run's own."""
        groups = self.optimizer.param_groups
        flags = [{key: group.get(key) for key in _IMPLEMENTATION_FLAGS} for group in groups]
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            for name, part in self.session.stateful.items():
                if name in state:
                    part.load_state_dict(state[name])
            self._num_steps = int(state["num_steps"])
        finally:
            # The saved groups carry the implementation of the run that saved them.
            for group, own in zip(self.optimizer.param_groups, flags, strict=True):
                group.update((key, own[key]) for key in own if key in group)

    def close(self) -> None:
        """Take the strategies off the model and the optimizer."""
        self._undo_strategies()
        self._undos = []
        if self._guard is not None:
            self._guard.close()

    def _on_device(self, batch: Any) -> Any:
        """Move a batch to the GPU; on the CPU it is left alone."""
        place = self.session.device_type
        if place == CPU:
            return batch
        return tree_map_only(torch.Tensor, lambda t: t.to(place, non_blocking=True), batch)

    def _observing(self, batch: Any) -> Any:
        if self._monitor is None:
            return nullcontext(StepReading())
        leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        batch_bytes = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        return self._monitor.observe(self.session.owned_tensors(batch), batch_bytes)

    def _carry_out(self, batch: Any) -> torch.Tensor:
        session, enter_phase = self.session, self._enter_phase
        session.spill.begin_step()
        try:
            enter_phase(Phase.FORWARD)
            loss = session.gradient_pass(session, batch, enter_phase)
            enter_phase(Phase.OPTIMIZER)
            session.update(session)
        finally:  # the gradients of a step that failed are not those of the next one
            session.optimizer.zero_grad(set_to_none=True)
        return loss

    def _enter_phase(self, phase: Phase) -> None:
        if self._guard is not None:
            self._guard.phase = phase
        self._listener(phase)

    def _undo_strategies(self) -> None:
        for undo in reversed(self._undos):
            undo()


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


def apply_strategies(session: Session, strategies: Sequence[Strategy]) -> list[Undo]:
    """Apply strategies in the order of the catalogue.

    Raises:
        StrategyError: if one cannot apply, with the reason.
    """
    if clash := conflict(strategies):
        raise StrategyError(strategies[0].name, f"{clash}.")
    undos: list[Undo] = []
    facts = gather_facts(session)
    for strategy in in_catalogue_order(strategies):
        if reason := strategy.obstacle(facts):
            raise StrategyError(strategy.name, reason)
        undos.append(strategy.apply(session))
    return undos


def _ignore_phase(_phase: Phase) -> None:
    """Listen to nothing."""
