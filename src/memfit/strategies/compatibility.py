"""Which strategies cannot be combined, and why, gathered from what each of them excludes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from memfit.strategies import CATALOGUE


@dataclass(frozen=True, slots=True)
class Rule:
    """Two strategies that exclude each other, and a clause that says why."""

    first: str
    second: str
    reason: str


def _rules() -> Iterator[Rule]:
    """Yield what strategies exclude; the one that is shown first is named first."""
    names = [strategy.name for strategy in CATALOGUE]
    for strategy in CATALOGUE:
        for other, reason in strategy.excludes.items():
            first, second = sorted((strategy.name, other), key=names.index)
            yield Rule(first, second, reason)


RULES: tuple[Rule, ...] = tuple(_rules())


def clash(names: Iterable[str]) -> Rule | None:
    """Return the first rule that a combination breaks; None if it breaks none."""
    present = set(names)
    return next((rule for rule in RULES if {rule.first, rule.second} <= present), None)
