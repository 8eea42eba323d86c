"""Records plans that will be asked for in processes beside this one, before they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from memfit.planner.search.aside import Aside
from memfit.planner.search.candidates import Candidate, Strategies

_NICE = 5
"""Of what may turn out not to be wanted."""


Foreseen = TypeVar("Foreseen")
"""What recording a combination gives in a copy of this process."""


@dataclass(slots=True)
class _Task(Generic[Foreseen]):
    aside: Aside[Foreseen]
    is_sure: bool
    found: Foreseen | None = None
    is_collected: bool = False

    def result(self) -> Foreseen | None:
        """Wait for what was found, and keep it; the process is over then."""
        if not self.is_collected:
            self.found, self.is_collected = self.aside.result(), True
        return self.found

    @property
    def is_running(self) -> bool:
        """Return whether there is nothing to be had yet."""
        return not self.is_collected and self.aside.is_running


def _never(_: Strategies) -> bool:
    return False


@dataclass(slots=True, kw_only=True)
class Foresight(Generic[Foreseen]):
    """Have combinations recorded beside this process; the answers are the same as without.

    Whatever fails there, or was recorded from another state than that which is reached here, is
    recorded again here when it is asked for.
    """

    record: Callable[[Strategies], Foreseen]
    """Records a combination; called in a copy of this process."""
    accept: Callable[[Foreseen], Candidate | None]
    """Takes what a copy found as if it had been found here; None where it began differently."""
    tell: Callable[[Strategies], None]
    """Told of what is waited for."""
    num_processes: int
    """This one among them."""
    most_seconds: float
    """How long one is waited for."""
    is_known: Callable[[Strategies], bool] = _never
    """Says of a combination whether it need not be recorded, because an earlier call has."""
    _tasks: dict[Strategies, _Task[Foreseen]] = field(default_factory=dict, init=False)
    _wanted: list[Strategies] = field(default_factory=list, init=False)

    def expect(self, combinations: Iterable[Strategies], *, is_sure: bool = True) -> None:
        """Hear of what will be asked for next, in that order, surely or perhaps."""
        combinations = [each for each in combinations if not self.is_known(each)]
        new = [each for each in combinations if each not in self._tasks]
        if is_sure:
            self._wanted = new
            self._drop_guesses({*combinations})
            self._start_wanted()
            return
        for strategies in new[: self._num_free() - 1]:
            self._start(strategies, is_sure=False)

    def take(self, strategies: Strategies) -> Candidate | None:
        """Return what another process records, waiting for it; None if none does, or it failed."""
        self._wanted = [each for each in self._wanted if each != strategies]
        task = self._tasks.pop(strategies, None)
        self._start_wanted()
        if task is None:
            return None
        self.tell(strategies)
        found = task.result()
        return None if found is None else self.accept(found)

    def close(self) -> None:
        """End what is not wanted any more."""
        self._wanted = []
        for task in self._tasks.values():
            task.aside.stop()
        self._tasks.clear()

    def _num_free(self) -> int:
        """Count the processes that may be started; those that are through are let go first."""
        running = [task for task in self._tasks.values() if task.is_running]
        for task in self._tasks.values():
            if task not in running:
                task.result()  # waiting to be asked, it would hold its memory
        return self.num_processes - len(running)

    def _start_wanted(self) -> None:
        """Start what is surely wanted; the first is left to this process."""
        for strategies in self._wanted[1:]:
            if self._num_free() <= 0:
                break
            self._wanted.remove(strategies)
            self._start(strategies, is_sure=True)

    def _start(self, strategies: Strategies, *, is_sure: bool) -> None:
        niceness = 0 if is_sure else _NICE
        aside = Aside(lambda: self.record(strategies), niceness, self.most_seconds)
        self._tasks[strategies] = _Task(aside, is_sure)

    def _drop_guesses(self, wanted: set[Strategies]) -> None:
        """End guesses that take the place of what is surely wanted."""
        for strategies, task in list(self._tasks.items()):
            if not task.is_sure and strategies not in wanted and task.is_running:
                task.aside.stop()
                del self._tasks[strategies]
