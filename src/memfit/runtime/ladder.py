"""The smaller plans that a run may go on with, and when to try a larger one again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from memfit.errors import NoSmallerPlanError
from memfit.session.session import Session
from memfit.strategies import CATALOGUE
from memfit.strategies.base import AbstractSplitting, Strategy
from memfit.strategies.fact_finding import gather_facts
from memfit.strategies.facts import JobFacts
from memfit.strategies.plan import Plan, in_catalogue_order


def smaller_plans(plan: Plan, session: Session) -> Iterator[Plan]:
    """Yield the plans below one: its ladder, from the top, and then ever smaller micro-batches.

    Raises:
        NoSmallerPlanError: once there is nothing more that would keep the results.
    """
    for number, rung in enumerate(plan.ladder):
        if _goes(rung.strategies, session):
            yield replace(rung, device=plan.device, ladder=plan.ladder[number + 1 :])
    yield from _halved(plan, session)


def _halved(plan: Plan, session: Session) -> Iterator[Plan]:
    """Yield plans with the micro-batch halved, and halved again, where that keeps the results.

    Raises:
        NoSmallerPlanError: if there are none.
    """
    own = plan.splitting
    size = session.job.batch_size if own is None else own.micro_batch_size
    others = [strategy for strategy in plan.strategies if strategy is not own]
    facts = gather_facts(session)
    refusal: str | None = None  # of the largest pieces, cut in the usual way
    has_any = False
    while size > 1:
        size //= 2
        for split in _ways_to_cut(own, size, facts):
            reason = _doubt(split, facts)
            if reason is not None:
                refusal = refusal or reason
                continue
            strategies = in_catalogue_order([*others, split])
            if not _goes(strategies, session):
                continue
            has_any = True
            yield replace(
                plan, strategies=strategies, prediction=None, ladder=(), proof=None, reasons=()
            )
    if not has_any:
        raise NoSmallerPlanError(refusal or "micro-batches have one sample already.")


def _goes(strategies: Sequence[Strategy], session: Session) -> bool:
    """Return whether strategies may be applied to a model that ranks share, where it is one."""
    return session.agreement is None or all(each.goes_with_shards for each in strategies)


def _ways_to_cut(
    own: AbstractSplitting | None, micro_batch_size: int, facts: JobFacts
) -> Iterator[AbstractSplitting]:
    """Yield the plan's own way to cut a batch with another size, or all that suit the job."""
    if own is not None:
        yield own.with_size(micro_batch_size)
        return
    for kind in CATALOGUE:
        if issubclass(kind, AbstractSplitting):
            split = kind(micro_batch_size=micro_batch_size)
            if split.unsuited(facts) is None:
                yield split


def _doubt(split: AbstractSplitting, facts: JobFacts) -> str | None:
    """Say why pieces of a size may not keep the results; None where it is known that they do."""
    if reason := split.obstacle(facts):
        return reason
    found = split.separability(facts.separation)
    return None if found.is_settled else f"it could not be proved: {found.sentence}"


class LargerPlans:
    """Keep the plans above the one in force, and count steps until one is tried again.

    Memory may have been short for a while only: another program on the card, or one large batch.
    Trying costs a failed attempt at worst; the wait doubles whenever it fails.
    """

    def __init__(self, after_steps: int) -> None:
        self._wait_steps = after_steps
        self._above: list[Plan] = []
        self._num_good_steps = 0
        self._has_climbed = False

    def note_step(self) -> None:
        """Note a step that went well."""
        self._num_good_steps += 1

    def note_descent(self, plan: Plan) -> None:
        """Note that a plan was left for a smaller one."""
        if self._has_climbed:
            self._wait_steps *= 2
        self._above.append(plan)
        self._num_good_steps = 0
        self._has_climbed = False

    def due_plan(self) -> Plan | None:
        """Return the plan to try again; None where none is due."""
        if not self._above or not self._wait_steps or self._num_good_steps < self._wait_steps:
            return None
        return self._above[-1]

    def note_climb(self) -> None:
        """Note that the plan that was due is in force."""
        self._above.pop()
        self._num_good_steps = 0
        self._has_climbed = True

    def note_refusal(self) -> None:
        """Note that the plan that was due cannot be applied any more."""
        self._above.clear()
