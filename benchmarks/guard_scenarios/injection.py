"""Runs a training with an error at a chosen operator, and tells how it ended."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from guard_scenarios.digest import differences, digest
from guard_scenarios.training import NUM_STEPS, Scenario, Training
from memfit.runtime.run import Run

_CPU_ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried "
    "to allocate 1073741824 bytes. Error code 12 (Cannot allocate memory)"
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Where errors are raised: at operators, counted over all steps from 1."""

    operators: tuple[int, ...] = ()
    comes_after: bool = False
    """Whether the operator has been run when the error comes."""
    is_cpu_allocator: bool = False


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What a training ended with."""

    state: dict[str, Any]
    error: str
    """Empty where it went through."""
    said: str
    """What the run had said cannot be put back, before the first error."""
    places: list[tuple[int, str]]
    """Step and phase of every operator."""
    num_raised: int
    num_undone: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How one injection ended: equal, said, ended-true-reason, ended-wrong-reason, different."""

    outcome: str
    place: tuple[int, str]
    detail: str = ""


class _Faults(TorchDispatchMode):
    """Raise at operators, and note where each was called."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        self.places: list[tuple[int, str]] = []
        self.num_raised = 0
        self.step = 0
        self.run: Any = None
        self.is_inside = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Carry an operator out, or raise."""
        if threading.current_thread() is not threading.main_thread():
            return func(*args, **(kwargs or {}))
        self.places.append((self.step, self.run._steps.place if self.is_inside else "guard"))
        is_hit = len(self.places) in self.fault.operators
        result = func(*args, **(kwargs or {})) if self.fault.comes_after or not is_hit else None
        if is_hit:
            self.num_raised += 1
            if self.fault.is_cpu_allocator:
                raise RuntimeError(_CPU_ALLOCATOR)
            raise torch.OutOfMemoryError(f"CUDA out of memory, made up at {func}")
        return result

    def follow(self, run: Run) -> None:
        """Tell attempts at steps from what the guard does besides."""
        self.run = run
        steps: Any = run._steps
        attempt = steps.attempt

        def followed(*args: Any, **kwargs: Any) -> Any:
            self.is_inside = True
            try:
                return attempt(*args, **kwargs)
            finally:
                self.is_inside = False

        steps.attempt = followed


def carried_out(scenario: Scenario, fault: Fault) -> Ending:
    """Build a training and run it with a fault."""
    _seed(3)
    training = scenario.build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = training.start()
        mode = _Faults(fault)
        mode.follow(run)
        try:
            return _ending(training, run, mode, caught)
        finally:
            run.close()
            training.closed()


def _ending(training: Training, run: Run, mode: _Faults, caught: list[Any]) -> Ending:
    losses: list[torch.Tensor] = []
    error, said = "", ""
    training.started(run)
    _seed(1)
    for number in range(NUM_STEPS):
        batch = training.draw(number)
        training.before(run, number)
        if not mode.num_raised:
            said = _said(run, caught)
        mode.step = number + 1
        try:
            with mode:
                result = run.step(batch)
        except Exception as ended:  # noqa: BLE001 - whatever ends a run is judged by its words
            error = f"{type(ended).__name__}: {ended}"
            break
        losses.append(result.loss.clone())
        training.after(run, number)
    return Ending(
        state={} if error else _everything(training, run, losses),
        error=error,
        said=said,
        places=mode.places,
        num_raised=mode.num_raised,
        num_undone=len(run.events),
    )


def _said(run: Run, caught: list[Any]) -> str:
    """Return what the run says that it cannot put back."""
    return " ".join(map(str, getattr(run, "not_put_back", ()))) if caught else ""


def _everything(training: Training, run: Run, losses: list[torch.Tensor]) -> dict[str, Any]:
    return digest(
        model=run.model,
        optimizer=run.optimizer,
        scaler={name: part.state_dict() for name, part in run._steps.session.stateful.items()},
        loss=training.job.loss,
        watched=[*training.watched],
        between=[training.draw, training.before, training.after],
        losses=losses,
        num_steps=run.num_steps,
        torch_random=torch.get_rng_state(),
        python_random=random.getstate(),
        numpy_random=repr(np.random.get_state()),
    )


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def judged(scenario: Scenario, fault: Fault, undisturbed: Ending) -> Verdict:
    """Run a training with a fault and compare it with the undisturbed one."""
    found = carried_out(scenario, fault)
    place = undisturbed.places[min(fault.operators) - 1]
    if not found.error:
        different = differences(found.state, undisturbed.state)
        outcome = "different-unsaid" if different else "equal"
        return Verdict(outcome=outcome, place=place, detail=", ".join(different[:4]))
    outcome = "ended-wrong-reason"
    if scenario.must_say and scenario.must_say in found.said and scenario.must_say in found.error:
        outcome = "said"
    elif scenario.may_end and scenario.may_end in found.error:
        outcome = "ended-true-reason"
    return Verdict(outcome=outcome, place=place, detail=found.error[:400])


def drawn_faults(places: Sequence[tuple[int, str]], count: int, seed: str) -> list[Fault]:
    """Draw where to fail: phases in turn, so that a short update is met as often as a long forward.

    Every fifth fault is followed by another one soon after, in what is done about the first.
    """
    draw = random.Random(seed)
    phases = ["optimizer", "forward", "backward", "optimizer", "guard"]
    by_phase: dict[str, list[int]] = {}
    for number, (_, phase) in enumerate(places, 1):
        by_phase.setdefault(phase, []).append(number)
    present = [phase for phase in phases if by_phase.get(phase)]
    faults = []
    for number in range(count):
        first = draw.choice(by_phase[present[number % len(present)]])
        second = (first + draw.randint(1, 60),) if number % 5 == 4 else ()
        faults.append(
            Fault(
                operators=(first, *second),
                comes_after=draw.random() < 0.5,
                is_cpu_allocator=draw.random() < 0.3,
            )
        )
    return faults
