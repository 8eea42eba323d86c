"""Which strategies cannot be combined, and why: one table for planner, runs and documents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """Two strategies that exclude each other, and a clause that says why."""

    first: str
    second: str
    reason: str


RULES: tuple[Rule, ...] = (
    Rule(
        "micro-batching",
        "batchnorm-replay",
        "both decide how a batch is cut into pieces",
    ),
    Rule(
        "activation-checkpointing",
        "batchnorm-replay",
        "replay stops forward passes half way, inside blocks that checkpointing runs as a whole",
    ),
)


def clash(names: Iterable[str]) -> Rule | None:
    """Give the first rule that a combination breaks; None if it breaks none."""
    present = set(names)
    return next((rule for rule in RULES if {rule.first, rule.second} <= present), None)
