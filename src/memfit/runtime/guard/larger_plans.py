"""When to try a larger plan again."""

from __future__ import annotations

from memfit.strategies.plan import Plan


class Climbing:
    """Keep the plans above the one in force, and count steps until one is tried again.

    Memory may have been short for a while only: another program on the card, or one large batch.
    Trying costs a failed attempt at worst; the wait doubles whenever it fails.
    """

    def __init__(self, after_steps: int) -> None:
        self._wait_steps = after_steps
        self._above: list[Plan] = []
        self._num_good_steps = 0
        self._has_climbed = False

    def note_step(self) -> None:
        """Note a step that went well."""
        self._num_good_steps += 1

    def note_descent(self, plan: Plan) -> None:
        """Note that a plan was left for a smaller one."""
        if self._has_climbed:
            self._wait_steps *= 2
        self._above.append(plan)
        self._num_good_steps = 0
        self._has_climbed = False

    def due_plan(self) -> Plan | None:
        """Return the plan to try again; None where none is due."""
        if not self._above or not self._wait_steps or self._num_good_steps < self._wait_steps:
            return None
        return self._above[-1]

    def note_climb(self) -> None:
        """Note that the plan that was due is in force."""
        self._above.pop()
        self._num_good_steps = 0
        self._has_climbed = True

    def note_refusal(self) -> None:
        """Note that the plan that was due cannot be applied any more."""
        self._above.clear()
