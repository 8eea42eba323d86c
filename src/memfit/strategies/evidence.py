"""What shows that the pieces of a plan keep the results, and the words for it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from memfit.analysis.separability import NeverHolds, Separability
from memfit.strategies.base import Strategy
from memfit.strategies.facts import JobFacts


class Evidence(StrEnum):
    """Say what shows that a plan's pieces keep the results, from a proof to nothing at all."""

    PROVED = "proved"
    TRIAL = "trial"
    UNPROVED = "unproved"


def evidence_of(
    strategies: Sequence[Strategy], facts: JobFacts
) -> tuple[Evidence, tuple[str, ...]]:
    """Return the evidence for a combination, and a sentence for each strategy that cuts batches.

    A batch that nobody cuts needs no proof.
    """
    evidence, reasons = Evidence.PROVED, []
    for split in filter(None, (strategy.splitting for strategy in strategies)):
        found = split.separability(facts.separation)
        evidence = _kind_of(found)
        reasons.append(f"{split.label()}: {_reason(found, facts)}")
    return evidence, tuple(reasons)


def condition_words(condition: NeverHolds, facts: JobFacts) -> str:
    """Return what a batch must keep to: ``batch['labels'] never holds -100``."""
    separation = facts.separation
    name = "the batch" if separation is None else separation.layout.name_of(condition.leaf)
    return f"{name} never holds {condition.value}"


def _kind_of(found: Separability) -> Evidence:
    if found.is_proved:
        return Evidence.PROVED
    return Evidence.TRIAL if found.trial else Evidence.UNPROVED


def _reason(found: Separability, facts: JobFacts) -> str:
    if found.is_proved:
        held = " and ".join(condition_words(each, facts) for each in found.conditions)
        tried = f" ({_TRIED.format(_listed(found.tried))})" if found.tried else ""
        left = f"; {_LEFT.format(_listed(found.overwritten))}" if found.overwritten else ""
        holds = f"; holds while {held}" if held else ""
        return f"proved from the recorded step{tried}{holds}{left}."
    if found.trial:
        return f"settled by trial: {found.trial} Not proved: {found.sentence}"
    return f"not proved: {found.sentence}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


_LEFT = "{} will hold what one piece leaves there, which no step reads"
_TRIED = "but for {}, of which it is not proved, only tried on examples, that samples stay apart"
