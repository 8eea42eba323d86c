"""What a training system adds to the journal of its run, as a file: ``training.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from memfit.errors import DataError
from memfit.figures import (
    Certainty,
    ConsideredPlan,
    Holder,
    Interval,
    Measurement,
    Prediction,
    Term,
)
from memfit.files import write_atomically
from memfit.journal.lines import read_rows
from memfit.journal.one_axis import laid_along
from memfit.journal.plain_text import parsed_json, read_written
from memfit.journal.timeline import timeline_from_json, timeline_json

from .wording import measured_bytes

TRAINING_NAME = "training.json"
METRICS_NAME = "metrics.jsonl"
"""A line per epoch or validation: its number first (``epoch`` or ``step``), then loss, a
validation metric and the like."""
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What was predicted before a training, and what came of it."""

    title: str
    command: str
    """The command line that repeats the run."""
    budget_bytes: int | None
    plain: Prediction
    planned: Prediction
    considered: Sequence[ConsideredPlan]
    measured: Measurement | None = None
    """One step of the largest batch; None before training has ended."""
    run_peak_bytes: int | None = None
    """The highest peak allocated that was measured while training; None where there was none."""
    results: Mapping[str, Any] = field(default_factory=dict)
    """The final metrics by name."""
    pictures: Sequence[str] = ()
    """PNG files in the run folder that show results."""

    @property
    def found_bytes(self) -> int | None:
        """Return the measured figure that the budget bounds: training's own where it is known."""
        budget_of = self.planned.budget_of
        if budget_of == "allocated" and self.run_peak_bytes is not None:
            return self.run_peak_bytes
        return None if self.measured is None else measured_bytes(self.measured, budget_of)


def write_training(folder: Path, training: Training) -> None:
    """Write ``training.json``; long timelines are thinned."""
    fields = asdict(
        replace(
            training,
            plain=replace(training.plain, timeline=None),
            planned=replace(training.planned, timeline=None),
            measured=training.measured and replace(training.measured, timeline=None),
        )
    )
    plain, planned = training.plain.timeline, training.planned.timeline
    measured = training.measured.timeline if training.measured else None
    if measured is not None and planned is not None:
        measured = laid_along(measured, planned)
    for name, timeline in {"plain": plain, "planned": planned, "measured": measured}.items():
        if timeline is not None:
            fields[name]["timeline"] = timeline_json(timeline)
    content = {"memfit_training": _VERSION, **fields}
    write_atomically(folder / TRAINING_NAME, json.dumps(content) + "\n")


def read_training(folder: Path) -> Training | None:
    """Read what a training system has written into its run folder; None where there is nothing.

    Raises:
        DataError: if the file is something else.
    """
    path = folder / TRAINING_NAME
    if not path.exists():
        return None
    try:
        content = parsed_json(read_written(path))
        if content.pop("memfit_training") != _VERSION:
            raise DataError(str(path), f"it does not say memfit_training: {_VERSION}")
        measured = content.pop("measured")
        return Training(
            plain=_prediction(content.pop("plain")),
            planned=_prediction(content.pop("planned")),
            considered=[_considered(row) for row in content.pop("considered")],
            measured=None if measured is None else Measurement(**_with_timeline(measured)),
            **content,
        )
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError) as error:
        reason = f"it does not tell of a training ({type(error).__name__}: {error})"
        raise DataError(str(path), reason) from error


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the plain values of each line of ``metrics.jsonl``; a line that was cut off is none."""
    path = folder / METRICS_NAME
    return [
        {name: value for name, value in row.items() if not isinstance(value, dict)}
        for row in read_rows(path)
    ]


def _prediction(content: dict[str, Any]) -> Prediction:
    terms = [{**term, "certainty": Certainty(term["certainty"])} for term in content["terms"]]
    return Prediction(
        **{
            **_with_timeline(content),
            "strategies": tuple(content["strategies"]),
            "certainty": Certainty(content["certainty"]),
            "terms": [Term(**term) for term in terms],
            "intervals": {name: Interval(**each) for name, each in content["intervals"].items()},
            "largest": [Holder(**holder) for holder in content["largest"]],
        }
    )


def _considered(row: dict[str, Any]) -> ConsideredPlan:
    return ConsideredPlan(**{**row, "strategies": tuple(row["strategies"])})


def _with_timeline(content: dict[str, Any]) -> dict[str, Any]:
    timeline = content["timeline"]
    return {**content, "timeline": None if timeline is None else timeline_from_json(timeline)}
