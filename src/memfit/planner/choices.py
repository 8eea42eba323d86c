"""What the planner may combine: the settings of each strategy that this job and user allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from memfit.errors import StrategyError, UsageError
from memfit.session.facts import JobFacts
from memfit.strategies import CATALOGUE, strategy_class
from memfit.strategies.base import AbstractSplitting, Numerics, Strategy
from memfit.strategies.plan import conflict, in_catalogue_order

Choice = Strategy | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The planner's options.

    ``fixed_size`` holds, for each strategy, its settings and None for going without it; ``splits``
    the micro-batch settings from the largest to the smallest.
    """

    fixed_size: tuple[tuple[Choice, ...], ...]
    splits: tuple[Strategy, ...]
    must_split: bool
    """Whether a micro-batch setting was required by name."""
    refused: tuple[tuple[str, str], ...]
    """Strategies left out, each with the reason."""

    def combinations(self) -> Iterator[tuple[Strategy, ...]]:
        """Yield every combination without micro-batches."""
        for members in product(*self.fixed_size):
            chosen = [member for member in members if member is not None]
            if not conflict(chosen):
                yield in_catalogue_order(chosen)


def gather_choices(
    facts: JobFacts,
    allow: Sequence[str] = (),
    require: Sequence[str] = (),
    forbid: Sequence[str] = (),
) -> Choices:
    """Ask every strategy of the catalogue for the settings it could have.

    Args:
        facts: what is known of the job.
        allow: names of strategies, or numerics classes, that may change the results.
        require: names of strategies that every plan must have.
        forbid: names of strategies that no plan may have.

    Raises:
        UsageError: if a name is unknown, or both required and forbidden.
        StrategyError: if a required strategy cannot apply.
    """
    _check_names(allow, require, forbid)
    fixed: list[tuple[Choice, ...]] = []
    splits: list[Strategy] = []
    refused: list[tuple[str, str]] = []
    for strategy in CATALOGUE:
        is_required = strategy.name in require
        options, reason = _options(strategy, facts, is_required or _is_allowed(strategy, allow))
        if strategy.name in forbid:
            options, reason = [], "it was forbidden."
        if reason:
            refused.append((strategy.name, reason))
        if is_required and not options:
            raise StrategyError(strategy.name, reason or "it has no settings for this job.")
        if issubclass(strategy, AbstractSplitting):
            splits += options
        elif options:
            fixed.append((*([] if is_required else [None]), *options))
    return Choices(
        fixed_size=tuple(fixed),
        splits=tuple(splits),
        must_split=any(split.name in require for split in splits),
        refused=tuple(refused),
    )


def _options(
    strategy: type[Strategy], facts: JobFacts, is_allowed: bool
) -> tuple[list[Strategy], str]:
    """Give the settings of a strategy that can apply, or the reason why none can."""
    if not is_allowed:
        reason = f"it is {strategy.numerics}; allow it by name with --allow {strategy.name}"
        return [], reason
    options: list[Strategy] = []
    reason = "there is nothing in this job that it could act on."
    for option in strategy.options(facts):
        obstacle = option.obstacle(facts)
        if obstacle is None:
            options.append(option)
        else:
            reason = obstacle
    return options, "" if options else reason


def _is_allowed(strategy: type[Strategy], allow: Sequence[str]) -> bool:
    if strategy.numerics.rank <= Numerics.SAME_IN_LAW.rank:
        return True
    return strategy.name in allow or str(strategy.numerics) in allow


def _check_names(allow: Sequence[str], require: Sequence[str], forbid: Sequence[str]) -> None:
    classes = [str(numerics) for numerics in Numerics]
    if both := sorted(set(require) & set(forbid)):
        raise UsageError(f"{both[0]} is both required and forbidden; leave out one of the two.")
    for name in (*allow, *require, *forbid):
        if name in classes and name in allow:
            continue
        try:
            strategy_class(name)
        except StrategyError as error:
            raise UsageError(str(error)) from None
