"""Refuses strategies for models that ranks share."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.errors import StrategyError
from memfit.strategies.base import Strategy


def refuse_what_does_not_go_with_shards(strategies: Sequence[Strategy]) -> None:
    """Refuse strategies that were not shown to keep the results of a model in shards.

    Raises:
        StrategyError: if there are any.
    """
    refused = [
        f"{each.label()} of the plan does not go with that: {each.not_with_shards}."
        for each in strategies
        if not each.goes_with_shards
    ]
    if refused:
        reason = f"the ranks exchange shards. {' '.join(refused)} Plan without it."
        raise StrategyError("sharded model", reason)
