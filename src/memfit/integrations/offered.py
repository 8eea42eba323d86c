"""What a framework's loop has a place for: strategies are asked for, left out and refused by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from memfit.errors import MemfitError
from memfit.figures import Refusal, RefusalKind
from memfit.planner.result.planning_result import PlanningResult


def refuse_required(required: Sequence[str], not_offered: Mapping[str, str], loop: str) -> None:
    """Refuse strategies that have to be in the plan and have no place in the loop.

    Args:
        required: names of strategies.
        not_offered: names, each with who does it instead.
        loop: whose it is, such as ``Lightning``.

    Raises:
        MemfitError: with the reason.
    """
    for name in required:
        if name in not_offered:
            raise MemfitError(f"{name} cannot be had in {loop}'s loop: {not_offered[name]}")


def all_forbidden(forbidden: Sequence[str], not_offered: Mapping[str, str]) -> list[str]:
    """List what the planner may not use: what the user forbids, and what has no place."""
    return [*dict.fromkeys((*forbidden, *not_offered))]


def with_reasons(found: PlanningResult, not_offered: Mapping[str, str]) -> PlanningResult:
    """Say why strategies are left out that the loop has no place for."""
    refused = [
        Refusal(kind=RefusalKind.UNSUITED, strategy=each.strategy, sentence=reason)
        if (reason := not_offered.get(each.strategy))
        else each
        for each in found.refused
    ]
    return replace(found, refused=refused)
