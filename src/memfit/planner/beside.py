"""What is found out in processes beside this one while a plan is sought."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from memfit.planner.cache.kept_recordings import KeptRecordings
from memfit.planner.search.aside import Aside, can_fork
from memfit.planner.search.evaluation import Foreseen
from memfit.planner.search.foresight import Foresight
from memfit.planner.search.splits import SplitChecks
from memfit.prediction.predict import wants_effects
from memfit.separation.findings import Findings
from memfit.separation.separation import Separation

_NICE = 19
"""It is wanted last, so recordings come first."""
_LEAST_WAIT_SECONDS = 20.0
_MOST_TIMES = 20
"""As long as recording the plain step took; a copy that takes longer is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Recordings of plans that will be asked for, and what the notes of every plan say."""

    ahead: Foresight[Foreseen] | None = None
    checks: SplitChecks | None = None

    def learn_effects(self) -> None:
        """Take over what the step changes besides gradients, waiting for it."""
        if self.checks is not None:
            self.checks.learn_effects()


@contextmanager
def beside(kept: KeptRecordings, num_processes: int) -> Iterator[Beside]:
    """Use other processes inside, where more than one may be used; nothing is left of them."""
    evaluator = kept.evaluator
    if num_processes < 2 or not can_fork():
        yield Beside()
        return
    plain, checks = evaluator.plain, evaluator.space.split_checks
    separation = plain.facts.separation if wants_effects(plain) else None
    ahead = Foresight(
        record=evaluator.foresee,
        accept=kept.accept,
        tell=evaluator.tell,
        is_known=kept.is_known,
        num_processes=num_processes,
        most_seconds=_LEAST_WAIT_SECONDS + _MOST_TIMES * plain.record_seconds,
    )
    if checks is not None and separation is not None:
        checks.effects = Aside(partial(_with_effects, separation), _NICE)
    try:
        yield Beside(ahead=ahead, checks=checks)
    finally:
        ahead.close()
        if checks is not None:
            checks.close()


def _with_effects(separation: Separation) -> Findings:
    """Find what every step changes; called in a copy of this process."""
    separation.effects()
    return separation.findings()
