"""What is seen while planning goes on: the best plan so far, and what is being recorded."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from memfit.journal.printable import printable
from memfit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.figures import EarlierPlan, PlanSoFar

_LEAST_WORDS = 20


class PlanningProgress:
    """Show on one line what is done; where nobody is watching, each better plan on a line.

    Args:
        show: changes the line; None where there is none.
        write: writes a line of its own.
        width: how wide the line may be.
    """

    def __init__(
        self, show: Callable[[str], None] | None, write: Callable[[str], object], width: int = 80
    ) -> None:
        self._show, self._write, self._width = show, write, width
        self._best, self._known_seconds = "", math.inf
        self._num_begun = 0

    def recording(self, label: str) -> None:
        """Say which plan is being recorded."""
        self._num_begun += 1
        if self._show is None:
            return
        begun = f"{self._best or 'recording'} · {self._num_begun}: "
        room = max(_LEAST_WORDS, self._width - len(begun))
        words = label if len(label) <= room else f"{label[: room - 1]}…"
        # Square brackets in a label would be read as markup.
        self._show(f"{begun}{words}".replace("[", r"\["))

    def say(self, text: str) -> None:
        """Say what is done before anything is recorded."""
        if self._show is not None:
            self._show(text)

    def known(self, found: EarlierPlan) -> None:
        """Tell of a plan that fits before any is looked for."""
        sizes = f"{format_bytes(found.peak_bytes)}, {format_seconds(found.step_seconds)} a step"
        self._best, self._known_seconds = f"known to fit: {sizes}", found.step_seconds
        self.say(self._best)
        if self._show is None:
            plan = " + ".join(found.strategies) or "as it is"
            self._write(f"memfit: an earlier call has found a plan that fits in {sizes}: {plan}\n")

    def better(self, found: PlanSoFar) -> None:
        """Take note of a plan that is better than those before it, and than one that is known."""
        if found.step_seconds >= self._known_seconds:
            return
        sizes = f"{format_bytes(found.peak_bytes)}, {_against(found)}"
        self._best = f"fits: {sizes}"
        if self._show is None:
            after = format_seconds(found.elapsed_seconds)
            plan = " + ".join(found.strategies) or "as it is"
            self._write(
                f"memfit: after {after} a plan that fits in {sizes}; {found.num_left} may be "
                f"faster: {plan}\n"
            )


@contextmanager
def planning_progress(
    console: Console, text: str, *, quiet: bool = False
) -> Iterator[PlanningProgress]:
    """Show progress where someone is watching, and write lines to standard error elsewhere."""
    if quiet or not console.is_terminal:
        yield PlanningProgress(None, (lambda _line: None) if quiet else _write)
        return
    with console.status(text) as shown:
        yield PlanningProgress(shown.update, _write, console.width - 2)


def _write(line: str) -> None:
    sys.stderr.write(printable(line))


def _against(found: PlanSoFar) -> str:
    """Say how long a step takes, beside the step as it is."""
    seconds = f"{format_seconds(found.step_seconds)} a step"
    if not found.plain_step_seconds:
        return seconds
    return f"{seconds}, {found.step_seconds / found.plain_step_seconds:.2f} x plain"
