"""What the chosen plan would take with one approximation more, each recorded."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from memfit.errors import StrategyError
from memfit.figures import Approximation, RefusalKind
from memfit.planner.search.candidates import Evaluator, Strategies
from memfit.planner.search.options import SearchSpace
from memfit.strategies import strategy_class
from memfit.strategies.base import Numerics, Strategy
from memfit.strategies.facts import JobFacts
from memfit.strategies.plan import conflict, in_catalogue_order

_MOST_RECORDINGS = 4


def not_allowed(space: SearchSpace) -> list[str]:
    """Name the strategies that were left out because they change the results.

    Those that train another problem are left to who asks for them.
    """
    left_out = (each.strategy for each in space.refused if each.kind is RefusalKind.NOT_ALLOWED)
    return [name for name in left_out if strategy_class(name).numerics is not Numerics.DIFFERENT]


def approximations(
    evaluate: Evaluator, chosen: Strategies, space: SearchSpace, facts: JobFacts
) -> tuple[tuple[Approximation, ...], list[str]]:
    """Record the chosen plan with each strategy that was not allowed, in its mildest setting.

    What excludes it is left out, unless it was required.

    Returns:
        What was recorded, the fastest first, and a sentence for each that could not be.
    """
    found: list[Approximation] = []
    failures: list[str] = []
    wanted = [
        (setting, in_catalogue_order([*(s for s in chosen if not conflict([s, setting])), setting]))
        for setting in islice(_mildest_settings(space, facts), _MOST_RECORDINGS)
    ]
    if evaluate.ahead is not None:
        evaluate.ahead.expect([strategies for _, strategies in wanted])
    for setting, strategies in wanted:
        try:
            prediction = evaluate.once_expected(strategies).prediction
        except StrategyError as error:
            failures.append(f"--allow {setting.name} was tried: {error.reason}")
            continue
        found.append(
            Approximation(
                allow=setting.name,
                strategies=tuple(strategy.label() for strategy in strategies),
                peak_bytes=prediction.bounded_bytes(),
                step_seconds=prediction.step_seconds,
            )
        )
    found.sort(key=lambda approximation: approximation.step_seconds)
    return tuple(found), failures


def _mildest_settings(space: SearchSpace, facts: JobFacts) -> Iterator[Strategy]:
    """Yield the first setting of each strategy that can apply beside what was required."""
    for name in not_allowed(space):
        settings = strategy_class(name).options(facts)
        setting = next((s for s in settings if s.obstacle(facts) is None), None)
        if setting is not None and not conflict([*space.required, setting]):
            yield setting
