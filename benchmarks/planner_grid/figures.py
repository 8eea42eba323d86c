"""Sums the planner's benchmark up: figures over all cells, and whatever is not as promised."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MODES = ("guessed", "estimated", "measured")
"""Times of operators by the catalogue, by what was measured of the processor, and of the job."""
Jobs = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the planner gave for one job, budget and way of estimating."""

    job: str
    mode: str
    cell: Mapping[str, Any]

    @property
    def figures(self) -> Mapping[str, Any]:
        """Return what is known of it."""
        return self.cell[self.mode]

    @property
    def is_plan(self) -> bool:
        """Return whether there is a plan."""
        return "strategies" in self.figures

    @property
    def is_within(self) -> bool:
        """Return whether the measured peak keeps to the budget."""
        return bool(self.figures["measured_bytes"] <= self.cell["budget_bytes"])

    @property
    def error_fraction(self) -> float:
        """Return how far the predicted peak is from the measured one."""
        measured_bytes = self.figures["measured_bytes"]
        return float(abs(self.figures["predicted_bytes"] - measured_bytes) / measured_bytes)

    @property
    def fault(self) -> str:
        """Return what is not as promised; empty if all is."""
        figures = self.figures
        if "failure" in figures:
            return f"no answer: {figures['failure']}"
        if not self.is_plan:
            return "" if figures["is_right"] else "it says that nothing fits, but something does"
        if not self.is_within:
            over_bytes = figures["measured_bytes"] - self.cell["budget_bytes"]
            return f"measured {over_bytes:,} bytes over the budget"
        return ""


def answers(jobs: Jobs) -> Iterator[Answer]:
    """Yield all answers of all jobs."""
    for name, job in jobs.items():
        for cell in job["cells"]:
            for mode in MODES:
                yield Answer(job=name, mode=mode, cell=cell)


def summary(jobs: Jobs) -> dict[str, Any]:
    """Return the figures over all cells."""
    given = list(answers(jobs))
    plans = [answer for answer in given if answer.is_plan]
    errors = sorted(answer.error_fraction for answer in plans)
    again = [answer.figures["time_again_over_time"] for answer in plans]
    proofs = [proof for job in jobs.values() for proof in job["proofs"]]
    return {
        "num_jobs": len(jobs),
        "num_cells": sum(len(job["cells"]) for job in jobs.values()),
        "num_plans": len(plans),
        "num_within_budget": sum(answer.is_within for answer in plans),
        "num_refusals": len(given) - len(plans),
        "num_right_refusals": sum(bool(a.figures.get("is_right")) for a in given if not a.is_plan),
        "num_enumerated": sum(job["num_enumerated"] for job in jobs.values()),
        "median_abs_error_fraction": statistics.median(errors) if errors else None,
        "worst_abs_error_fraction": errors[-1] if errors else None,
        "time_over_best": {mode: _times(plans, mode) for mode in MODES},
        "time_again_over_time": _spread([ratio for ratio in again if ratio]),
        "num_proofs": len(proofs),
        "num_kept_promises": sum(proof["keeps_promise"] for proof in proofs),
        "largest_proven_error": max((proof["largest_error"] or 0.0 for proof in proofs), default=0),
        "faults": list(faults(jobs)),
    }


def faults(jobs: Jobs) -> Iterator[str]:
    """Name everything that is not as promised."""
    for answer in answers(jobs):
        if answer.fault:
            share = f"{answer.cell['budget_fraction']:.0%}"
            yield f"{answer.job} at {share}, {answer.mode}: {answer.fault}"
    for name, job in jobs.items():
        for labels, reason in job["failures"].items():
            yield f"{name} under {labels}: {reason}"
        for proof in job["proofs"]:
            if not proof["keeps_promise"]:
                said = proof.get("failure") or f"only {proof['earned']}"
                yield f"{name}, {proof['strategy']}: {said}"


def _times(plans: Sequence[Answer], mode: str) -> dict[str, float]:
    return _spread([plan.figures["time_over_best"] for plan in plans if plan.mode == mode])


def _spread(ratios: Sequence[float]) -> dict[str, float]:
    ordered = sorted(ratios)
    if not ordered:
        return {}
    return {
        "median": round(statistics.median(ordered), 3),
        "p10": round(ordered[(len(ordered) - 1) // 10], 3),
        "p90": round(ordered[-1 - (len(ordered) - 1) // 10], 3),
        "worst": round(ordered[-1], 3),
        "within_5_percent": round(sum(r <= 1.05 for r in ordered) / len(ordered), 3),
    }
