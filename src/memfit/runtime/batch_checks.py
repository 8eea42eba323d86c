"""Checks every batch that a plan would cut, before anything is computed with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from memfit.analysis.separability import Separability
from memfit.errors import BatchConditionError, MemfitWarning, NotSeparableError
from memfit.journal.records import UnprovedPlanEvent
from memfit.journal.sentences import event_sentence
from memfit.separation.batch_conditions import broken_condition
from memfit.session.session import Session
from memfit.strategies.base import AbstractSplitting
from memfit.strategies.evidence import Evidence
from memfit.strategies.facts import known_separation
from memfit.strategies.plan import Plan

TrySplit = Callable[[Session, AbstractSplitting, Any, bool], tuple[bool, str]]
"""Says whether a batch shows that pieces keep the results, and what it shows. It may be held to the
memory of a step. Raises NotSeparableError if gradients depend on the pieces."""
_Key = tuple[AbstractSplitting, int]


class BatchChecks:
    """See that a plan's pieces keep the results on the batches that training really has.

    A batch of a new size is looked into once. What could not be followed is tried once, on the
    first batch that it would be used for: its gradients against those of other pieces.

    Args:
        session: with the plan's strategies applied.
        try_split: tries what could not be followed; None leaves it untried.
    """

    def __init__(self, session: Session, *, try_split: TrySplit | None = None) -> None:
        self._session = session
        self._try_split = try_split
        self._known: dict[_Key, Separability] = {}
        self._tried: set[AbstractSplitting] = set()
        self.on_event: Callable[[UnprovedPlanEvent], None] | None = None
        """Is told of plans that run unproved."""

    def check(self, plan: Plan, batch: Any) -> None:
        """Refuse a batch whose pieces would not add up to it; on the host, if it is still there.

        Raises:
            NotSeparableError: if a batch of this size cannot be cut so.
            BatchConditionError: if the proof does not hold for what the batch contains.
        """
        for split, found in self._splits(plan, batch):
            if found.is_refuted:
                raise NotSeparableError(split.label(), found.sentence)
            broken = broken_condition(self._session.layout, batch, found.conditions)
            if broken is not None:
                raise BatchConditionError(split.label(), broken.sentence)

    def try_unproved(self, plan: Plan, batch: Any) -> None:
        """Try once what could not be followed, on a batch that lies on the session's device.

        Raises:
            NotSeparableError: if the gradients depend on how the batch is cut.
        """
        if self._try_split is None:
            return
        for split, found in self._untried(plan, batch):
            is_bounded = plan.prediction is not None
            is_shown, trial = self._try_split(self._session, split, batch, is_bounded)
            self._tried.add(split)
            if is_shown:
                split.settle(known_separation(self._session), replace(found, trial=trial))
            self._tell(plan, split, found, trial)

    def _untried(self, plan: Plan, batch: Any) -> Sequence[tuple[AbstractSplitting, Separability]]:
        """Return what is to be tried now; where ranks wait for each other, what any of them has."""
        split, agreement = plan.splitting, self._session.agreement
        if split is None or split in self._tried:
            return ()
        found = [each for each in self._splits(plan, batch) if not each[1].is_settled]
        if agreement is None or not agreement.any_of(bool(found)):
            return found
        return found or [
            (split, self._separability(split, self._session.layout.num_samples(batch)))
        ]

    def _splits(self, plan: Plan, batch: Any) -> Iterator[tuple[AbstractSplitting, Separability]]:
        """Yield what cuts this batch, with what is known of batches of its size."""
        split, num_samples = plan.splitting, self._session.layout.num_samples(batch)
        if split is not None and split.micro_batch_size < num_samples:
            yield split, self._separability(split, num_samples)

    def _separability(self, split: AbstractSplitting, num_samples: int) -> Separability:
        key = (split, num_samples)
        if key not in self._known:
            separation = known_separation(self._session)
            here = None if separation is None else separation.at_batch_size(num_samples)
            self._known[key] = split.separability(here)
        return self._known[key]

    def _tell(self, plan: Plan, split: AbstractSplitting, found: Separability, trial: str) -> None:
        event = UnprovedPlanEvent(
            step=0, plan=plan.labels(), strategy=split.label(), reason=found.sentence, trial=trial
        )
        if self.on_event is not None:
            self.on_event(event)
        if plan.proof is not Evidence.TRIAL:  # it was known when the plan was made
            warnings.warn(event_sentence(event), MemfitWarning, stacklevel=2)
