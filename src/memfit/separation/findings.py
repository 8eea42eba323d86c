"""What was found out about a job's step, as it is told from one process or call to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memfit.analysis.effects import Effects
from memfit.analysis.separability import Separability


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What was found out about a job's step, without the recordings that it was found from."""

    judged: Mapping[tuple[int, bool], Separability]
    settled: Mapping[tuple[object, ...], Separability]
    of_rows: Mapping[str, Separability]
    representations: tuple[str, ...] | None
    effects: Effects | None = None
