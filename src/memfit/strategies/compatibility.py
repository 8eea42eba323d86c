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
        "micro-batching",
        "cached-gradients",
        "both decide how a batch is cut into pieces",
    ),
    Rule(
        "batchnorm-replay",
        "cached-gradients",
        "both decide how a batch is cut into pieces",
    ),
    Rule(
        "activation-checkpointing",
        "batchnorm-replay",
        "replay stops forward passes half way, inside blocks that checkpointing runs as a whole",
    ),
    Rule(
        "optimizer-in-backward",
        "micro-batching",
        "an update needs the gradients of all pieces, which are added up after one another",
    ),
    Rule(
        "optimizer-in-backward",
        "batchnorm-replay",
        "an update needs the gradients of all passes, which are added up after one another",
    ),
    Rule(
        "eight-bit-optimizer",
        "optimizer-implementation",
        "the 8-bit optimizer has one implementation, its own",
    ),
    Rule("bf16", "fp16", "both choose the type that forward and loss compute in"),
    Rule("bf16", "pure-bf16", "both choose the type that forward and loss compute in"),
    Rule("fp16", "pure-bf16", "both choose the type that forward and loss compute in"),
    Rule(
        "fp16",
        "optimizer-in-backward",
        "gradients are scaled back, and a step skipped, only when all of them are there",
    ),
    Rule(
        "pure-bf16",
        "optimizer-in-backward",
        "updates inside backward would be rounded to the nearest value and so be lost",
    ),
)


def clash(names: Iterable[str]) -> Rule | None:
    """Return the first rule that a combination breaks; None if it breaks none."""
    present = set(names)
    return next((rule for rule in RULES if {rule.first, rule.second} <= present), None)
