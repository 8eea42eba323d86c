"""The plan of a case, found without the card: what it would take is predicted here."""

from __future__ import annotations

import time
from typing import Any

import torch

import memfit
from memfit.errors import MemfitError
from memfit.strategies.plan import Plan

from .cases import ALONE, BUDGET, strategy_names
from .jobs import card_jobs

_SEARCH_SECONDS = 12.0
_KEPT = (
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "process_bytes",
    "first_step_peak_bytes",
    "step_seconds",
    "host_bytes",
    "num_flops",
    "numerics",
    "fits",
    "budget_bytes",
    "record_seconds",
    "intervals",
    "terms",
    "notes",
)


def planned(task: dict[str, Any]) -> dict[str, Any]:
    """Find the plan of a case; what is refused is said, with its reason."""
    started = time.perf_counter()
    job = card_jobs(task["size"])[task["job"]]()
    try:
        plan, budget = _plan(job, task)
    except MemfitError as error:
        return {"refused": f"{type(error).__name__}: {error}", **_after(started)}
    prediction = plan.prediction or memfit.predict(job, task["device"], plan)
    figures = prediction.to_json()
    return {
        "plan": Plan(strategies=plan.strategies, device=plan.device).to_json(),
        "strategies": list(plan.labels()),
        "budget_bytes": budget,
        "predicted": {name: figures[name] for name in _KEPT if name in figures},
        **_after(started),
    }


def _plan(job: memfit.Job, task: dict[str, Any]) -> tuple[Plan, int | None]:
    device = task["device"]
    if task["kind"] == ALONE:
        name = task["strategy"]
        others = [each for each in strategy_names() if each != name]
        found = memfit.plan(
            job, device, require=[name], forbid=others, prove=False, seconds=_SEARCH_SECONDS
        )
        return found, None
    plain = memfit.predict(job, device)
    if task["kind"] != BUDGET:
        return Plan(device=device).with_prediction(plain), None
    whole = plain.peak_allocated_bytes if device == "cpu" else plain.process_bytes
    budget = int(task["share"] * whole)
    found = memfit.plan(job, device, budget, prove=False, seconds=_SEARCH_SECONDS)
    return found, budget


def _after(started: float) -> dict[str, Any]:
    return {
        "planning_seconds": time.perf_counter() - started,
        "planning_touched_card": torch.cuda.is_initialized(),
    }
