"""Which pieces a batch may be cut into; each size is looked into when it is first considered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from memfit.analysis.separability import Separability
from memfit.errors import StrategyError
from memfit.figures import Refusal, RefusalKind
from memfit.planner.search.aside import Aside, AsideSeries
from memfit.planner.trial import BatchTrial
from memfit.separation.batch_conditions import broken_condition
from memfit.separation.findings import Findings
from memfit.session.batches import real_batch
from memfit.session.deterministic_draws import untouched_randomness
from memfit.strategies import CATALOGUE
from memfit.strategies.base import AbstractSplitting, Numerics, Strategy
from memfit.strategies.facts import JobFacts

_EXACT_WAY = "cached-gradients"
_NICE = 19
"""Pieces are looked into ahead with what recording leaves of the processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedInto:
    """What a copy of this process has found out about pieces."""

    split: AbstractSplitting | None
    """None where what the step changes was found besides."""
    refusal: Refusal | None
    findings: Findings | None


class SplitChecks:
    """Say which of some ways to cut a batch keep the results, or may be taken nevertheless.

    Args:
        splits: the ways, from the mildest on.
        facts: what is known of the job.
        allowed: the names of those that may be taken unproved.
        trial: settles what could not be followed; None where nothing may be run.
    """

    def __init__(
        self,
        splits: Sequence[AbstractSplitting],
        facts: JobFacts,
        allowed: frozenset[str] = frozenset(),
        trial: BatchTrial | None = None,
    ) -> None:
        self._splits = splits
        self._facts = facts
        self._allowed = allowed
        self._trial = trial
        self._batch: Any = None
        self._refusals: dict[AbstractSplitting, Refusal | None] = {}
        self._ahead: AsideSeries[LookedInto] | None = None
        self.effects: Aside[Findings] | None = None
        """Finds what the step changes besides gradients in a process beside this one."""
        self._finds_effects = False
        """Whether the series is still to find that as well."""
        self._foreseen: dict[AbstractSplitting, Refusal | None] = {}

    def look_ahead(self, likely: Sequence[AbstractSplitting] = ()) -> None:
        """Look into pieces in a process beside this one, in the order in which they are wanted.

        Args:
            likely: what is likely to be asked for before the others, which come from the largest
                on.
        """
        if not self._splits or self._facts.separation is None:
            return
        # Pieces rest on what the step changes, which need not be found twice.
        if self.effects is not None and self.effects.is_running:
            self.effects.stop()
            self._finds_effects = True
        else:
            self.learn_effects()
        self._ahead = AsideSeries(partial(self._looked_ahead, likely), _NICE)

    def learn_effects(self) -> None:
        """Take over what the step changes besides gradients, waiting for it."""
        while self._ahead is not None and self._finds_effects:
            self._take_over_next()
        found = None if self.effects is None else self.effects.result()
        if found is not None and self._facts.separation is not None:
            self._facts.separation.learn(found)

    def is_awaited(self, split: AbstractSplitting) -> bool:
        """Return whether a copy of this process still looks into pieces, or is about to."""
        return not self.is_settled(split) and self._ahead is not None

    def close(self) -> None:
        """End what is found out ahead, if nobody has asked for it."""
        self._end_series()
        if self.effects is not None:
            self.effects.stop()

    def _end_series(self) -> None:
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None

    def obstacle(self, split: AbstractSplitting) -> str | None:
        """Say why a batch may not be cut that way; None if it may."""
        if split not in self._refusals:
            while self._ahead is not None and split not in self._foreseen:
                self._take_over_next()
            if split in self._foreseen:
                self._refusals[split] = self._foreseen[split]
            else:
                self._refusals[split] = self._better(split) or self._looked_into(split)
        refusal = self._refusals[split]
        return None if refusal is None else refusal.sentence

    @property
    def allows_some(self) -> bool:
        """Return whether some pieces that were asked for may be taken.

        What is only foreseen does not count: the report must not depend on how fast a copy was.
        """
        return None in self._refusals.values()

    def is_settled(self, split: AbstractSplitting) -> bool:
        """Return whether it is known by now, without waiting, if a batch may be cut that way."""
        while self._ahead is not None and not self._ahead.is_running:
            self._take_over_next()
        return split in self._refusals or split in self._foreseen

    def _looked_ahead(self, likely: Sequence[AbstractSplitting]) -> Iterator[LookedInto]:
        """Look into pieces one after the other; called in a copy.

        Beyond the likely ones it ends with the first that may be taken: others are rarely asked
        for, and looking into them would take from what is recorded meanwhile.
        """
        separation = self._facts.separation
        assert separation is not None, "else nothing is looked into ahead"
        is_refused = True
        for split in dict.fromkeys((*likely, *self._splits)):
            if not is_refused and split not in likely:
                break
            is_refused = self.obstacle(split) is not None
            refusal = self._refusals[split]
            yield LookedInto(split=split, refusal=refusal, findings=separation.findings())
            if self._finds_effects:
                self._finds_effects = False
                separation.effects()
                yield LookedInto(split=None, refusal=None, findings=separation.findings())

    def _take_over_next(self) -> None:
        """Wait for what is looked into ahead now; end that if there is nothing more to come."""
        found = None if self._ahead is None else self._ahead.next()
        if found is None:
            self._end_series()
            return
        if found.split is None:
            self._finds_effects = False
        else:
            self._foreseen[found.split] = found.refusal
        if self._facts.separation is not None and found.findings is not None:
            self._facts.separation.learn(found.findings)

    def check_any(self) -> None:
        """Refuse a search for pieces where there are none.

        Raises:
            StrategyError: if no size of any strategy may be taken.
        """
        reasons = (self.obstacle(split) for split in self._splits)
        if self._splits and all(reason is not None for reason in reasons):
            first = self._splits[0]
            raise StrategyError(first.name, self.obstacle(first) or "")

    def refused(self) -> tuple[Refusal, ...]:
        """Return what was looked into and may not be taken."""
        found: dict[tuple[str, str], list[AbstractSplitting]] = {}
        kinds: dict[tuple[str, str], RefusalKind] = {}
        for split, refusal in self._refusals.items():
            if refusal is not None:
                key = split.name, refusal.sentence
                found.setdefault(key, []).append(split)
                kinds.setdefault(key, refusal.kind)
        return tuple(
            Refusal(kind=kinds[key], strategy=self._named(splits), sentence=key[1])
            for key, splits in found.items()
        )

    def _named(self, splits: Sequence[AbstractSplitting]) -> str:
        """Name sizes: by the strategy alone where all that were looked into are among them."""
        name = splits[0].name
        if sum(split.name == name for split in self._refusals) == len(splits):
            return name
        return ", ".join(split.label() for split in splits)

    def _better(self, split: AbstractSplitting) -> Refusal | None:
        """Say which strategy does the same with less; that is the first of which a size works."""
        for other in self._splits:
            if other.name == split.name:
                return None
            if self.obstacle(other) is None:
                return _refusal(split, f"{other.name} does the same with less work.")
        return None

    def _looked_into(self, split: AbstractSplitting) -> Refusal | None:
        found, trial = split.separability(self._facts.separation), self._trial
        is_wanted = trial is not None and (trial.settles or split.name in self._allowed)
        if trial is not None and is_wanted and not (found.is_settled or found.is_refuted):
            found = trial(split, found)
            split.settle(self._facts.separation, found)
        if found.is_refuted:
            return _refusal(
                split, " ".join((found.sentence, *self._exact_ways(split, found.sentence)))
            )
        is_open = not found.is_settled
        if is_open and split.name not in self._allowed:
            sentence = (
                f"it could not be proved: {found.sentence} `--allow {Numerics.UNPROVED}` takes it "
                "unproved, `--prove` settles it on a real batch."
            )
            return _refusal(split, sentence, is_open=True)
        broken = self._broken(found)
        return None if broken is None else _refusal(split, broken, is_open=is_open)

    def _broken(self, found: Separability) -> str | None:
        """Return which condition of a proof the job's own batch does not keep to."""
        separation = self._facts.separation
        if not found.conditions or separation is None:
            return None
        if self._batch is None:
            job = separation.job
            with untouched_randomness():
                torch.manual_seed(0)
                self._batch = real_batch(job, job.batch_size)
        broken = broken_condition(separation.layout, self._batch, found.conditions)
        return None if broken is None else broken.sentence

    def _exact_ways(self, split: AbstractSplitting, sentence: str) -> Iterator[str]:
        """Name what computes a loss on the whole batch and the rest in pieces, if not named yet."""
        is_there = any(strategy.name == _EXACT_WAY for strategy in CATALOGUE)
        if is_there and split.name != _EXACT_WAY and _EXACT_WAY not in sentence:
            yield f"The exact way for losses that mix samples is {_EXACT_WAY}."


def _refusal(split: AbstractSplitting, sentence: str, *, is_open: bool = False) -> Refusal:
    kind = RefusalKind.UNPROVED if is_open else RefusalKind.UNSUITED
    return Refusal(kind=kind, strategy=split.name, sentence=sentence)


def may_be_unproved(strategies: Sequence[type[Strategy]], allow: Sequence[str]) -> frozenset[str]:
    """Name those that may be taken although nobody could follow them; none for being required."""
    is_class_allowed = str(Numerics.UNPROVED) in allow
    names = (strategy.name for strategy in strategies)
    return frozenset(n for n in names if is_class_allowed or n in allow)
