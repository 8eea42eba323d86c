"""Runs again what a cut update has to go back over, and makes sure that it is the same.

The logged steps are repeated from the file; then the step that was cut is run once more,
and every operator of it is watched: at some point all parameters, optimizer states and gradients
have to be what they were when it was cut. If they are, the steps were repeated as they had been,
whatever else there may be in the process. If not, something has changed them in between.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from memfit.errors import UpdateCutError
from memfit.live_state.findings import Change, ChangeKind
from memfit.runtime.guard.attempts import Attempts, FailedAttempt
from memfit.runtime.guard.ranks import Ranks
from memfit.runtime.guard.state_marks import Mark, PassedState, Tensors, marks_of
from memfit.runtime.guard.step_entry import StepEntry
from memfit.runtime.guard.step_log import StepLog
from memfit.runtime.planned_steps import DoneStep, PlannedSteps
from memfit.runtime.retry import free_memory, retried

_MOST_TRIES = 5
_MOST_NAMED = 3
_AGAIN = "memory ran out again while the steps before it were run once more"
_OTHER_PLAN = "another rank cannot go back"
_UNSTEADY = (
    "steps do not give the same values when they are run again, so something that they "
    "draw from or change cannot be seen ({})"
)
_CHANGED = "something was changed between steps by other code, without autograd's notice ({})"


class Repetition:
    """Go back over logged steps.

    Args:
        steps: what runs them.
        attempts: what attempts them.
        ranks: who goes back at the same time.
        log: of the steps.
    """

    def __init__(self, steps: PlannedSteps, attempts: Attempts, ranks: Ranks, log: StepLog) -> None:
        self._steps = steps
        self._attempts = attempts
        self._ranks = ranks
        self._log = log
        self._device_type = steps.session.device_type
        self._marks: dict[str, Mark] | None = None
        self._tensors: Callable[[], Tensors] = log.large.now
        """Gives what was marked."""
        steps.on_failure = self._mark

    def begin(self) -> None:
        """Forget what an attempt before has left."""
        self._marks, self._tensors = None, self._log.large.now

    def go_back(self, entry: StepEntry, number: int, failure: FailedAttempt) -> int:
        """Go back to the beginning of a step; give how many steps were repeated.

        Raises:
            UpdateCutError: if there is nothing to go back to, or other values came out.
        """
        entries = [*self._log.entries]
        self._check(number, failure)
        tensors = self._tensors
        marks = self._marks or self._retried(lambda: marks_of(tensors()))
        if not self._any_try(lambda: self._repeated(entries)):
            raise UpdateCutError(number, failure.cause, _AGAIN)
        changes = entry.snapshot.changes() if entry.snapshot is not None else ()
        names = self._retried(lambda: self._log.write_repeated(number - 1, entry))
        if not self._all(self._retried(lambda: self._log.take_up(entry, names))):
            reason = self._log.obstacle or _CHANGED.format("there are other tensors than before")
            raise UpdateCutError(number, failure.cause, reason)
        passed = PassedState(marks, tensors)
        is_done = self._any_try(lambda: self._passed(entry, passed))
        self._steps.on_failure = self._mark
        if not self._all(passed.was_passed):
            reason = self._difference(entry, passed, changes) if is_done else _AGAIN
            raise UpdateCutError(number, failure.cause, reason)
        self._retried(self._log.roll_back)
        return len(entries)

    def _check(self, number: int, failure: FailedAttempt) -> None:
        """Refuse to go back where that cannot be.

        Raises:
            UpdateCutError: in that case, with the reason.
        """
        obstacle = self._log.obstacle
        if any(self._retried(entry.batch.is_changed_for_good) for entry in self._log.entries):
            obstacle = "a batch was changed after its step, for example by being filled anew"
        if not self._all(obstacle is None):
            raise UpdateCutError(number, failure.cause, obstacle or _OTHER_PLAN)

    def _any_try(self, tried: Callable[[], bool]) -> bool:
        """Try until memory suffices; say whether it did."""
        for _ in range(_MOST_TRIES):
            if self._all(tried()):
                return True
            free_memory(self._device_type)
        return False

    def _repeated(self, entries: list[StepEntry]) -> bool:
        """Carry logged steps out again from the file; say whether memory sufficed."""
        self._retried(self._log.roll_back)
        for entry in entries:
            batch = self._retried(partial(self._log.prepare, entry))
            if not isinstance(self._attempts.run(batch, lambda: True), DoneStep):
                return False
        return True

    def _passed(self, entry: StepEntry, passed: PassedState) -> bool:
        """Carry a step out under watch; say whether it went through, or passed what was sought."""
        self._steps.on_failure = passed.look
        self._retried(self._log.roll_back)
        self._retried(lambda: self._log.put_batch_back(entry))
        entry.random.put_back()  # a window's last batch was taken after draws of those before it
        with passed:
            passed.look()
            done = self._attempts.run(entry.batch.batch, lambda: True)
            passed.look()
        return passed.was_passed or isinstance(done, DoneStep)

    def _difference(
        self, entry: StepEntry, passed: PassedState, changes: tuple[Change, ...]
    ) -> str:
        """Say why other values came out, as truly as can be told.

        The step is run once more: where that gives other values than just now, nobody has
        to have changed anything in between.
        """
        after = marks_of(self._log.large.now())
        again = PassedState(after, self._log.large.now)
        self._passed(entry, again)
        self._steps.on_failure = self._mark
        if not again.was_passed:
            return _UNSTEADY.format(_listed(again.others))
        values = [str(change) for change in changes if _is_telling(change)]
        return _CHANGED.format(_listed(values or passed.others))

    def _mark(self) -> None:
        """Note what a failed attempt has left."""
        session = self._steps.session
        if self._marks is None and (self._attempts.is_updating or session.updates_in_backward):
            if self._attempts.is_averaging:  # gradients may be half averaged, and nothing else is
                self._tensors = self._log.large.named
            self._marks = self._retried(lambda: marks_of(self._tensors()))

    def _all(self, is_fine: bool) -> bool:
        """Return whether something holds on every rank."""
        said = self._ranks.exchange(int(not is_fine))
        return is_fine and not any(each[0] for each in said)

    def _retried(self, action: Callable[[], Any]) -> Any:
        return retried(action, self._device_type)


def _is_telling(change: Change) -> bool:
    """Return whether a change is one of values: other objects come with repeated steps anyway."""
    if change.kind is ChangeKind.CONTAINER:
        return change.detail.startswith("held")
    is_value = change.kind in {ChangeKind.ATTRIBUTE, ChangeKind.TENSOR}
    return is_value and "gradient" not in change.detail and "memory" not in change.detail


def _listed(names: Any) -> str:
    some = [*names][:_MOST_NAMED]
    more = len([*names]) - len(some)
    return ", ".join(some) + (f" and {more} more" if more else "")
