"""Judges what was claimed of micro-batching against what is true of each case."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from exactness.case import Case
from exactness.truth import Truth

KEEPS = ("exact", "same-in-law")
"""The classes that promise the results of the step in one piece."""
_UNBROKEN = ("", "exact", "unproved")
"""What a run may show of any of them; where it shows nothing, it contradicts nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What was said of micro-batching in four equal pieces."""

    numerics: str
    """``exact``, ``same-in-law``, ``unproved``, or ``different`` where a coupling was shown."""
    reason: str = ""
    earned: str = ""
    """The class that memfit's own run of the plan showed beside the plain step; empty where it
    promises nothing."""
    run_error: float | None = None
    """The largest relative error of that run, in fp64, draws held still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case with its claim."""

    name: str
    half: str
    adds: str
    draws: str
    leaves: str
    true_class: str
    claimed: str
    reason: str
    verdict: str
    worst_error: float
    """Of the gradient of one parameter, accumulated the usual way over four equal pieces."""
    reads_values: bool
    earned: str = ""
    run_error: float | None = None


def verdict(case: Case, numerics: str, earned: str = "") -> str:
    """Return what a claim is worth.

    ``false``: it promises more than is true. ``carried``: accumulating gradients would not keep the
    results, since forward changes something; memfit's own run puts that back between pieces and
    earns what was promised. ``sum``: it promises the results of a loss that adds
    up without weights, which is right only if pieces are summed so. ``proved``: it promises what
    is true. ``refuted``: it says rightly that results differ. ``too timid``: it says so wrongly.
    ``not known``: it promises nothing.
    """
    true_class = case.best_true_class
    if numerics in KEEPS:
        if case.adds == "sum" and case.draws == "none" and case.leaves != "different":
            return "sum"
        if true_class not in KEEPS and case.effects and earned in ("exact", numerics):
            return "carried"
        is_kept = true_class in KEEPS and (numerics, true_class) != ("exact", "same-in-law")
        return "proved" if is_kept else "false"
    if numerics == "unproved":
        return "not known"
    return "too timid" if true_class in KEEPS else "refuted"


def row(case: Case, claim: Claim, truth: Truth) -> Row:
    """Put a case, what is claimed of it and what is true of it side by side."""
    return Row(
        name=case.name,
        half=case.half,
        adds=truth.adds,
        draws=truth.draws,
        leaves=case.leaves,
        true_class=case.best_true_class,
        claimed=claim.numerics,
        reason=claim.reason,
        verdict=verdict(case, claim.numerics, claim.earned),
        earned=claim.earned,
        run_error=claim.run_error,
        worst_error=truth.cuts[0].worst_error,
        reads_values=truth.reads_values,
    )


def summary(rows: Iterable[Row]) -> dict[str, Any]:
    """Count verdicts for each half."""
    all_rows = list(rows)
    halves = sorted({each.half for each in all_rows})
    return {half: _half([each for each in all_rows if each.half == half]) for half in halves}


def _half(rows: list[Row]) -> dict[str, Any]:
    kept = [each for each in rows if each.true_class in KEEPS]
    other = [each for each in rows if each.true_class not in KEEPS]
    unknown = [each for each in rows if each.verdict == "not known"]
    return {
        "num_cases": len(rows),
        "num_kept": len(kept),
        "num_kept_proved": sum(each.verdict == "proved" for each in kept),
        "num_kept_not_known": sum(each.verdict == "not known" for each in kept),
        "num_different": len(other),
        "num_different_refuted": sum(each.verdict == "refuted" for each in other),
        "num_different_not_known": sum(each.verdict == "not known" for each in other),
        "num_carried": sum(each.verdict == "carried" for each in rows),
        "num_kept_recordable": sum(not each.reads_values for each in kept),
        "broken": [each.name for each in rows if each.earned not in (*_UNBROKEN, each.claimed)],
        "false": [each.name for each in rows if each.verdict == "false"],
        "sums": [each.name for each in rows if each.verdict == "sum"],
        "too_timid": [each.name for each in rows if each.verdict == "too timid"],
        "not_known": {each.name: each.reason for each in unknown},
    }


def as_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return rows as they are written; an infinite error, of a piece that failed, as None."""
    return [
        {**asdict(each), "worst_error": each.worst_error if each.worst_error < 1e300 else None}
        for each in rows
    ]
