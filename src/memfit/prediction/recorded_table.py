"""A step recorded in advance at several batch sizes, settings and plans."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from memfit.devices.spec import Device
from memfit.errors import MemfitError, UsageError
from memfit.figures import Prediction
from memfit.job import Job, StepBuilder
from memfit.prediction.brief_recording import record_briefly
from memfit.prediction.budget import MemoryBudget
from memfit.prediction.predict import evaluate
from memfit.strategies.plan import Plan

Settings = Mapping[str, Any]
"""Arguments of the function that makes the job, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One place of the table: what was asked for, and what it would take."""

    batch_size: int
    settings: Settings
    plan: str
    """What the plan is called: its file, or ``plain``."""
    prediction: Prediction | None = None
    """None where it could not be recorded, or was not come to."""
    reason: str = ""
    """Why there is no prediction."""

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values; a cell without a prediction has the reason."""
        found = {} if self.prediction is None else self.prediction.to_json()
        return {
            **found,
            "batch_size": self.batch_size,
            "settings": dict(self.settings),
            "plan": self.plan,
            "is_recorded": self.prediction is not None,
            "reason": self.reason,
        }


def cells_asked(
    batch_sizes: Sequence[int], settings: Mapping[str, Sequence[Any]], plans: Sequence[str]
) -> list[Cell]:
    """List the places of a table, those of one plan and setting after each other."""
    choices = [dict(zip(settings, values, strict=True)) for values in product(*settings.values())]
    return [
        Cell(batch_size=batch_size, settings=chosen, plan=plan)
        for plan in plans
        for chosen in choices
        for batch_size in batch_sizes
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableQuestion:
    """What all places of a table have in common."""

    target: Job | StepBuilder
    device: Device
    budget: MemoryBudget
    plans: Mapping[str, Plan]

    def job_with(self, settings: Settings) -> Job:
        """Return the job at some settings.

        Raises:
            UsageError: if the target takes none, or gives no job.
        """
        if isinstance(self.target, Job):
            if settings:
                msg = (
                    "--set calls a function that gives a memfit.Job with these arguments, and "
                    "what was named is a memfit.Job itself. Name such a function."
                )
                raise UsageError(msg)
            return self.target
        known = inspect.signature(self.target.function).parameters
        if unknown := [name for name in settings if name not in known]:
            raise UsageError(
                f"{self.target.name} takes no argument {unknown[0]!r}. It takes: "
                f"{', '.join(known) or 'none'}."
            )
        found = self.target.function(**settings)
        if not isinstance(found, Job):
            raise UsageError(
                f"{self.target.name} gives a {type(found).__name__}; a table is made of a "
                "memfit.Job, whose batch size can be changed."
            )
        return found


def recorded_cells(
    question: TableQuestion, cells: Sequence[Cell], tell: Callable[[int, Cell], object]
) -> Iterator[Cell]:
    """Record one place after the other; nothing is interpolated between them.

    Args:
        question: what they have in common.
        cells: what is asked for.
        tell: told of the number of each and of what it is, before it is recorded.

    Raises:
        UsageError: if the settings make no sense for the job.
    """
    for number, cell in enumerate(cells):
        tell(number, cell)
        try:
            yield replace(cell, prediction=_predicted(question, cell))
        except UsageError:
            raise
        except MemfitError as error:
            yield replace(cell, reason=str(error))


def _predicted(question: TableQuestion, cell: Cell) -> Prediction:
    plan = question.plans[cell.plan]
    job = replace(question.job_with(cell.settings), batch_size=cell.batch_size)
    recording = record_briefly(job, plan, device=question.device)
    return evaluate(job, recording, question.device, plan, budget=question.budget)
