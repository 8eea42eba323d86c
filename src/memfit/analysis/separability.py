"""Whether a step can be run in pieces of its batch: the answer, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Outcome(StrEnum):
    """Say what is known of a step's samples."""

    PROVED = "proved"
    REFUTED = "refuted"
    NOT_KNOWN = "not-known"


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """The operator that ended the matter, and where it was called."""

    operator: str
    source_line: str = ""
    module: str = ""

    def place(self) -> str:
        """Name operator and line: ``topk at losses.py:41``."""
        where = f" at {self.source_line}" if self.source_line else ""
        inside = f" in {self.module}" if self.module and not self.source_line else ""
        return f"{self.operator}{where}{inside}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NeverHolds:
    """What a proof takes for granted: no entry of a part of the batch has some value.

    A mean over labels leaves out those that equal its ``ignore_index``. While there are none, every
    sample has the same weight.
    """

    leaf: int
    """Which tensor of the batch, counted as its leaves are."""
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Separability:
    """Whether the gradients of pieces of a batch add up to those of the batch, and why.

    Attributes:
        outcome: proved, refuted or not known.
        sentence: why not, for the user; empty where it is proved.
        culprit: the operator at fault, where there is one.
        draws: whether random numbers are drawn for each sample, so that pieces draw others.
        conditions: what a batch must keep to for a proof to hold.
        tried: operators that the proof has no rule for: they were only tried on examples.
        overwritten: attributes that keep what one piece leaves, and that no step reads before
            it has set them itself.
        trial: what a real batch has shown where it is not known; empty where none was tried.
    """

    outcome: Outcome
    sentence: str = ""
    culprit: Culprit | None = None
    draws: bool = False
    conditions: tuple[NeverHolds, ...] = ()
    tried: tuple[str, ...] = ()
    overwritten: tuple[str, ...] = ()
    trial: str = ""

    @property
    def is_settled(self) -> bool:
        """Return whether pieces keep the results by a proof, or as far as a real batch shows."""
        return self.is_proved or bool(self.trial)

    @property
    def is_proved(self) -> bool:
        """Return whether pieces are known to keep the results."""
        return self.outcome is Outcome.PROVED

    @property
    def is_refuted(self) -> bool:
        """Return whether pieces are known to change the results."""
        return self.outcome is Outcome.REFUTED


PROVED = Separability(outcome=Outcome.PROVED)


def refuted(sentence: str, culprit: Culprit | None = None) -> Separability:
    """Say that pieces would change the results."""
    return Separability(outcome=Outcome.REFUTED, sentence=sentence, culprit=culprit)


def not_known(sentence: str, culprit: Culprit | None = None) -> Separability:
    """Say that it could not be followed."""
    return Separability(outcome=Outcome.NOT_KNOWN, sentence=sentence, culprit=culprit)


def worst_of(found: Sequence[Separability]) -> Separability:
    """Return the first refutation, else the first that is not known, else the proof."""
    for wanted in (lambda each: each.is_refuted, lambda each: not each.is_proved):
        worst = next((each for each in found if wanted(each)), None)
        if worst is not None:
            return worst
    conditions = dict.fromkeys(c for each in found for c in each.conditions)
    draws = any(each.draws for each in found)
    tried = dict.fromkeys(name for each in found for name in each.tried)
    overwritten = dict.fromkeys(name for each in found for name in each.overwritten)
    return replace(
        PROVED,
        draws=draws,
        conditions=tuple(conditions),
        tried=tuple(tried),
        overwritten=tuple(overwritten),
    )


def left_to_trial(found: Separability, counted_leaf: int | None) -> Separability:
    """Leave to a trial a proof that takes for granted what a loss counts by itself.

    Args:
        found: what is known.
        counted_leaf: which tensor of the batch has labels of which the loss counts those that are
            not ignored; None where it counts none.
    """
    if counted_leaf is None or all(each.leaf != counted_leaf for each in found.conditions):
        return found
    return not_known(
        "pieces count by the labels that the loss does not ignore, which is a matter of values."
    )
