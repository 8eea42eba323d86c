"""One job at all budgets: what the planner chose, what that took, and the best there was."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from memfit import Job, Plan, measure, plan
from memfit.devices.catalogue import load_device
from memfit.devices.spec import CPU
from memfit.errors import MemfitError, NoPlanFitsError
from memfit.planner.measured import measured_times
from memfit.planner.search.candidates import Strategies
from memfit.planner.search.evaluation import JobEvaluator
from memfit.planner.search.options import SearchSpace
from memfit.prediction.budget import MemoryBudget
from memfit.prediction.predict import evaluate
from memfit.prediction.recording import Recording
from memfit.session.batches import find_layout

from .enumeration import Enumeration, Found, shortlist
from .figures import MODES
from .processor import guessed_processor
from .proofs import prove_each
from .recordings import recorded_once
from .turns import time_in_turns, usual_ratio

Say = Callable[[str], None]
Seconds = Mapping[tuple[Strategies, str], list[float]]
"""Of each turn, by plan and whether it was run a second time."""
_AGAIN = "again"
_FINALISTS = 2
"""How many of the enumerated plans are timed once more, beside the planner's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How thoroughly a job is looked at."""

    most_recordings: int = 64
    most_plans: int = 12
    """Enumerated plans that are run for each budget."""
    screening_rounds: int = 1
    final_rounds: int = 4


@dataclass(slots=True, kw_only=True)
class _Cell:
    """One budget."""

    fraction: float
    budget_bytes: int
    plans: dict[str, Plan | MemfitError]
    """What the planner gave by each way of estimating, or why nothing."""
    shortlist: Sequence[Found] = ()
    finalists: Sequence[Strategies] = ()

    @property
    def chosen(self) -> dict[str, Strategies]:
        """Return the planner's plans."""
        return {
            mode: found.strategies for mode, found in self.plans.items() if isinstance(found, Plan)
        }


def run_job(job: Job, fractions: Sequence[float], effort: Effort, say: Say) -> dict[str, Any]:
    """Plan, enumerate, measure, time and prove one job.

    Args:
        job: what would be trained.
        fractions: budgets, as parts of the peak of the job as it is.
        effort: how thoroughly.
        say: told of each stage that begins.
    """
    started = time.perf_counter()
    device = load_device(CPU)
    with recorded_once(job) as recorded:
        plain = recorded(job, Plan(), find_layout(job), device=device)
        peak_bytes = evaluate(job, plain, device, Plan()).peak_allocated_bytes
        say("planning")
        cells = [_planned(job, fraction, int(fraction * peak_bytes)) for fraction in fractions]
        say("enumerating")
        search = _enumerate(job, plain, [cell.budget_bytes for cell in cells], effort)
        for cell in cells:
            cell.shortlist = _confirmed_shortlist(search, cell.budget_bytes, effort.most_plans)
        say("measuring peaks")
        peaks = {s: _peaks(job, s) for cell in cells for s in cell.chosen.values()}
    say("timing")
    seconds = [_timed(job, cell, effort) for cell in cells]
    plain_seconds = time_in_turns(job, {"plain": ()}, effort.screening_rounds)["plain"]
    say("proving")
    return {
        "plain_peak_bytes": peak_bytes,
        "plain_seconds": statistics.median(plain_seconds),
        "num_enumerated": len(search.found),
        "smallest_enumerated_bytes": min(each.peak_bytes for each in search.found),
        "failures": search.failures,
        "cells": [_row(cell, peaks, of_cell) for cell, of_cell in zip(cells, seconds, strict=True)],
        "proofs": prove_each(job, plain.facts),
        "whole_seconds": round(time.perf_counter() - started, 1),
    }


def _planned(job: Job, fraction: float, budget_bytes: int) -> _Cell:
    plans: dict[str, Plan | MemfitError] = {}
    for mode in MODES:
        processor = guessed_processor() if mode == "guessed" else nullcontext()
        try:
            with processor:
                plans[mode] = plan(job, CPU, budget_bytes, measure=mode == "measured")
        except MemfitError as error:
            plans[mode] = error
    return _Cell(fraction=fraction, budget_bytes=budget_bytes, plans=plans)


def _enumerate(
    job: Job, plain: Recording, budgets_bytes: Sequence[int], effort: Effort
) -> Enumeration:
    device = load_device(CPU)
    evaluator = JobEvaluator(
        job=job,
        device=device,
        layout=find_layout(job),
        times=measured_times(job, device, plain),
        budget=MemoryBudget(num_bytes=max(budgets_bytes), of="allocated"),
        space=SearchSpace(options=(), splits=(), must_split=False, refused=()),
        plain=plain,
    )
    search = Enumeration(evaluator, budgets_bytes, effort.most_recordings)
    search.run()
    return search


def _confirmed_shortlist(search: Enumeration, budget_bytes: int, most: int) -> list[Found]:
    """Record what is worth running in full, until nothing in the list is an estimate."""
    while True:
        chosen = shortlist(search.found, budget_bytes, most)
        if all(each.is_exact for each in chosen):
            return chosen
        for each in chosen:
            search.confirmed(each)


def _peaks(job: Job, strategies: Strategies) -> dict[str, int | None]:
    measurement = measure(job, Plan(strategies=strategies))
    return {
        "predicted_bytes": measurement.predicted_peak_bytes,
        "measured_bytes": measurement.peak_allocated_bytes,
    }


def _timed(job: Job, cell: _Cell, effort: Effort) -> Seconds:
    """Run the shortlist of a budget, then its fastest beside the planner's plans."""
    candidates = [each.strategies for each in cell.shortlist]
    screened = time_in_turns(job, {each: each for each in candidates}, effort.screening_rounds)
    others = [each for each in candidates if each not in cell.chosen.values()]
    others.sort(key=lambda each: usual_ratio(screened[each], screened[candidates[0]]))
    cell.finalists = others[:_FINALISTS]
    plans = {(each, ""): each for each in (*cell.chosen.values(), *cell.finalists)}
    if "estimated" in cell.chosen:
        plans[cell.chosen["estimated"], _AGAIN] = cell.chosen["estimated"]
    return time_in_turns(job, plans, effort.final_rounds)


def _row(
    cell: _Cell,
    peaks: Mapping[Strategies, Mapping[str, int | None]],
    seconds: Seconds,
) -> dict[str, Any]:
    """Write a cell as plain values."""
    row: dict[str, Any] = {
        "budget_fraction": cell.fraction,
        "budget_bytes": cell.budget_bytes,
        "num_run": len(cell.shortlist),
    }
    running = list(dict.fromkeys([*cell.chosen.values(), *cell.finalists]))
    best = min(
        running, key=lambda s: usual_ratio(seconds[s, ""], seconds[running[0], ""]), default=None
    )
    if best is not None:
        row["best"] = {"strategies": _labels(best), "seconds": _usual(seconds[best, ""])}
    for mode, found in cell.plans.items():
        if not isinstance(found, Plan):
            row[mode] = _refusal(found, cell)
            continue
        mine, again = seconds[found.strategies, ""], seconds.get((found.strategies, _AGAIN))
        row[mode] = {
            "strategies": _labels(found.strategies),
            **peaks[found.strategies],
            "seconds": _usual(mine),
            "time_over_best": usual_ratio(mine, seconds[best, ""]) if best is not None else None,
            "time_again_over_time": usual_ratio(again, mine) if again else None,
        }
    return row


def _refusal(error: MemfitError, cell: _Cell) -> dict[str, Any]:
    """Say why there is no plan, and whether that is so."""
    if not isinstance(error, NoPlanFitsError):
        return {"failure": f"{type(error).__name__}: {error}"}
    return {
        "smallest_peak_bytes": error.smallest_peak_bytes,
        "is_right": not cell.shortlist,
    }


def _labels(strategies: Strategies) -> list[str]:
    return list(Plan(strategies=strategies).labels())


def _usual(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds), 5)
