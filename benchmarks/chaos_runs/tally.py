"""Counts what came of many runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from chaos_runs.outcomes import Outcome
from chaos_runs.system_calls import Blow

_THOUSAND = 1000
Row = Mapping[str, Any]


def row_of(number: int, outcome: Outcome) -> dict[str, Any]:
    """Return what is kept of a run, as plain values."""
    story = outcome.story
    return {
        "number": number,
        "kind": story.kind,
        "ranks": story.num_ranks if story.kind == "ranks" else 1,
        "shares": story.shares,
        "faults": sorted({_fault_name(f.kind, f.how) for f in story.faults}),
        "strategies": sorted({each["name"] for each in outcome.strategies}),
        "struck": bool(outcome.struck),
        "ended": [each.partition(" ")[0] for each in outcome.ended],
        "violations": outcome.violations,
        "unusable": outcome.unusable[:300],
        "seconds": round(outcome.seconds, 2),
    }


def _fault_name(kind: str, how: str) -> str:
    if kind == "files" and how in {str(blow) for blow in Blow}:
        return f"disk: {how}"
    return f"{kind}: {how}" if kind in ("clock", "pipe") else kind


def tallied(rows: Sequence[Row]) -> dict[str, Any]:
    """Sum runs up, in their order."""
    done = [row for row in rows if not row["unusable"]]
    broken = [row for row in done if row["violations"]]
    thousands = [done[begin : begin + _THOUSAND] for begin in range(0, len(done), _THOUSAND)]
    return {
        "num_runs": len(done),
        "num_violations": len(broken),
        "num_violations_by_thousand": [
            sum(bool(row["violations"]) for row in each) for each in thousands
        ],
        "num_violations_in_last_thousand": sum(
            bool(row["violations"]) for row in done[-_THOUSAND:]
        ),
        "num_struck": sum(row["struck"] for row in done),
        "num_of_several_ranks": sum(row["ranks"] > 1 for row in done),
        "num_that_were_no_jobs": len(rows) - len(done),
        "by_kind": {
            kind: {
                "runs": sum(row["kind"] == kind for row in done),
                "struck": sum(row["kind"] == kind and row["struck"] for row in done),
            }
            for kind in sorted({row["kind"] for row in done})
        },
        "by_ranks": _counted(str(row["ranks"]) for row in done),
        "by_sharing": _counted(row["shares"] for row in done if row["shares"]),
        "by_fault": _counted(name for row in done for name in row["faults"]),
        "by_strategy": _counted(name for row in done for name in row["strategies"]),
        "violations": [
            {"number": row["number"], "kind": row["kind"], "said": row["violations"][0][:300]}
            for row in broken
        ],
    }


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))
