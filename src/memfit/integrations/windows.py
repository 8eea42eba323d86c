"""Runs the windows of another framework's loop: the passes whose gradients add up to one update."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch

from memfit.errors import (
    JobFunctionError,
    MemfitError,
    MemfitWarning,
    OutOfMemoryAfterAllError,
)
from memfit.live_state import LiveState, Snapshot
from memfit.live_state.random_sources import GlobalRandomness, RandomSourcesReader
from memfit.observe.observer import StepObserver
from memfit.runtime.data_parallel import GradientAverage
from memfit.runtime.first_step_check import check_split
from memfit.runtime.guard.attempts import Attempts
from memfit.runtime.guard.guard import Guard, GuardSettings
from memfit.runtime.guard.ranks import ranks_here
from memfit.runtime.guard.step_entry import StepEntry
from memfit.runtime.planned_steps import DoneStep, PlannedSteps, apply_strategies, undo_all
from memfit.separation.separation import Separation
from memfit.session.forwards import forwards_kept
from memfit.session.reachable import roots_of
from memfit.session.session import Session
from memfit.strategies.fact_finding import gather_facts
from memfit.strategies.facts import known_separation
from memfit.strategies.plan import Plan

_MOST_STARTS = 2000
_FLAGS = ("fused", "foreach")
"""What a plan sets in the groups of an optimizer."""


class WindowPart(Protocol):
    """One batch of a window, or what follows its batches."""

    @property
    def total_index(self) -> int:
        """Count the parts of all windows."""


PartT = TypeVar("PartT", bound=WindowPart)


class WindowSteps(PlannedSteps, Generic[PartT]):
    """Run windows that grow part by part; what guards and repeats them sees a list of parts.

    An attempt runs the part that came last. Where the gradients of those before it are lost, since
    an attempt has failed, it runs them again first. A framework says how a part is carried out.

    Args:
        session: on the living objects.
        plan: how.
        observer: measures every attempt.
        proofs: of sizes of pieces whose sums have been found to be those of the whole.
    """

    def __init__(
        self,
        session: Session,
        plan: Plan,
        *,
        observer: StepObserver,
        proofs: Mapping[int, Any] | None = None,
    ) -> None:
        self._undos = []
        separation = Separation(session.job, session.layout, inside=self._taken_off)
        for size, proof in (proofs or {}).items():
            separation.settled[size, False] = proof
        gather_facts(session, separation=separation)
        _ask(plan, session)
        super().__init__(session, plan, observer=observer, try_split=check_split)
        self._starts: dict[int, GlobalRandomness] = {}
        self._reader = RandomSourcesReader()
        self.window: list[PartT] = []
        """Under way; the last part is the one to be run."""
        self.snapshots: list[Snapshot | None] = []
        """What each part of the window began with; None for the first, and without a guard."""
        self.parameters: Callable[[], Sequence[torch.Tensor]] = lambda: [
            *session.model.parameters()
        ]
        """Lists those whose gradients are put aside."""
        self.sums: list[tuple[torch.Tensor, torch.Tensor | None]] | None = None
        """Parameters with their gradients when the last part came; None once these are lost."""

    def take(self, part: PartT, snapshot: Snapshot | None) -> None:
        """Add a part to the window; the gradients that are there are put aside until it is run."""
        self.window.append(part)
        self.snapshots.append(snapshot)
        if snapshot is not None:
            self._starts[part.total_index] = self._reader.here()
            while len(self._starts) > _MOST_STARTS:
                del self._starts[next(iter(self._starts))]
        self.sums = [(each, each.grad) for each in self.parameters()]
        for parameter, _ in self.sums:
            parameter.grad = None

    def end_window(self) -> None:
        """Begin with an empty one."""
        self.window, self.snapshots = [], []

    def change_plan(self, plan: Plan) -> None:
        """Run the steps to come under another plan; on an error the old one stays."""
        _ask(plan, self.session)
        super().change_plan(plan)

    def on_device(self, batch: Any) -> Any:
        """Leave a batch alone: the framework moves it."""
        return batch

    @contextmanager
    def _taken_off(self) -> Iterator[None]:
        """Take the plan off the living model, so that it is recorded as it is."""
        if not self._undos:
            yield
            return
        undo_all(self._undos)
        self._undos = []
        try:
            yield
        finally:
            self._undos = apply_strategies(self.session, self.plan.strategies)

    def _is_current(self, parts: Sequence[Any]) -> bool:
        """Return whether parts are those of the window under way."""
        return [part[0] for part in parts] == [part.total_index for part in self.window]

    def _put_sums_back(self) -> bool:
        """Give parameters the gradients that were put aside; say whether there were any still."""
        sums, self.sums = self.sums, None
        for parameter, gradient in sums or ():
            parameter.grad = gradient
        return sums is not None

    def _begin_again(self, number: int, part: PartT, *, is_current: bool) -> None:
        """Go back to what a part began with; what the first began with is there."""
        if number == 0:
            return
        snapshot = self.snapshots[number] if is_current else None
        if snapshot is not None:
            with forwards_kept(self.session.model):  # the plan may have become another
                snapshot.restore()
        elif part.total_index in self._starts:
            self._starts[part.total_index].put_back()


StepsT = TypeVar("StepsT", bound=WindowSteps[Any])


class PlannedWindows(Generic[StepsT]):
    """Run the windows of a loop under a plan, each in attempts that are undone where they fail.

    A framework takes the place of what its loop calls, and says what the parts of a window are.

    Args:
        steps: carry out the parts.
        observer: measures steps.
        guards: whether a window that runs out of memory is undone and run again.
        average: of the gradients over ranks, where the framework leaves that to memfit.
    """

    def __init__(
        self,
        steps: StepsT,
        observer: StepObserver,
        *,
        guards: bool,
        average: GradientAverage | None = None,
    ) -> None:
        self.steps = steps
        self._observer = observer
        self._average = average
        if steps.checks is not None:
            steps.checks.on_event = observer.event_of_next_step
        self.guard: Guard | None = None
        if guards:
            ranks = ranks_here()
            attempts = Attempts(steps, ranks, average)
            self.guard = guard = Guard(steps, attempts, ranks, GuardSettings(), observer.event)
            # It looks at each step whether there are others, so nobody else has to.
            steps.parameters = lambda: guard.parameters
        self._entry: StepEntry | None = None
        self._live: LiveState | None = None
        self._num_states = 0

    @property
    def plan(self) -> Plan:
        """Return the plan in force; a guard may have taken a smaller one."""
        return self.steps.plan

    def end(self) -> None:
        """Take the plan off the model."""
        self.steps.close()
        if self.guard is not None:
            self.guard.close()

    def _run_part(self, part: Any, number: int) -> tuple[DoneStep, float]:
        """Run the next part of a window; give how long the last attempt took as well.

        Raises:
            MemfitError: if it fits under no plan.
        """
        steps = self.steps
        if self.guard is None:
            steps.take(part, None)
            return steps.attempt(steps.window, self._average), 0.0
        is_first = not steps.window
        steps.take(part, None if is_first else self._snapshot())
        if is_first:
            self._entry = self.guard.begin(number)
        assert self._entry is not None, "a window has begun"
        return self.guard.run(self._entry, steps.window, number)

    def _log_window(self, seconds: float) -> None:
        """Log a window that is done, so that it can be repeated."""
        if self.guard is not None and self._entry is not None:
            self.guard.end(self._entry, seconds)
        self._entry = None
        states = sum(map(len, self.steps.session.optimizer.state.values()))
        if states != self._num_states:  # they are not to be copied before every part
            self._num_states, self._live = states, None

    def _report_window(self, number: int, batches: Sequence[Any], num_samples: int) -> None:
        """Tell the observer of a window that is done, and begin with an empty one."""
        self._observer.end_step(
            number,
            batches,
            plan=self.plan,
            num_samples=num_samples,
            micro_batch_size=self.steps.micro_batch_size,
        )
        self.steps.end_window()

    def _rehearse_window(self, number: int) -> None:
        """Try the window that is there, find a plan under which it fits, undo all but that.

        Raises:
            OutOfMemoryAfterAllError: if it fits under no plan.
        """
        assert self.guard is not None, "what is rehearsed has to be undone"
        try:
            self.guard.rehearse(self.steps.window, number)
        except OutOfMemoryAfterAllError:
            raise
        except MemfitError as error:
            msg = f"{error} Training begins without it."
            warnings.warn(msg, MemfitWarning, stacklevel=3)
        finally:
            self.steps.end_window()

    def _snapshot(self) -> Snapshot:
        """Keep what a later part of a window begins with, but for what the update changes."""
        if self._live is None:
            session = self.steps.session
            large: list[torch.Tensor] = [*session.model.parameters()]
            states = (s.values() for s in session.optimizer.state.values() if isinstance(s, dict))
            large += [each for state in states for each in state if torch.is_tensor(each)]
            self._live = LiveState(roots_of(session), leave_out=large)
        return self._live.snapshot()


@contextmanager
def as_without_a_plan() -> Iterator[None]:
    """Raise what the framework or its model has raised, as it would be without memfit."""
    try:
        yield
    except JobFunctionError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None


def flags_of(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what the groups of an optimizer say of its implementation."""
    return [{name: group[name] for name in _FLAGS if name in group} for group in groups]


def set_flags(groups: Iterable[dict[str, Any]], flags: Iterable[Mapping[str, Any]]) -> None:
    """Have the groups of an optimizer say something else of its implementation."""
    for group, own in zip(groups, flags, strict=False):
        group.update(own)


def _ask(plan: Plan, session: Session) -> None:
    """Find out what a plan's pieces do before anything of it is on the model."""
    if plan.splitting is not None:
        plan.splitting.separability(known_separation(session))
