"""What each operator does with samples; one rule serves many operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from memfit.analysis.flow import Flow
from memfit.analysis.rules import (
    bags,
    choosing,
    factories,
    indexing,
    joining,
    layers,
    losses,
    pointwise,
    products,
    reductions,
    sequences,
    views,
    writing,
)
from memfit.analysis.use import Use, operator_name

Rule = Callable[[Use], list[Flow]]
"""Gives what is known of the results, or raises CoupledError or NotFollowedError."""

_RULES: Mapping[str, Rule] = {
    **pointwise.RULES,
    **views.RULES,
    **factories.RULES,
    **reductions.RULES,
    **products.RULES,
    **layers.RULES,
    **losses.RULES,
    **indexing.RULES,
    **choosing.RULES,
    **joining.RULES,
    **sequences.RULES,
    **writing.RULES,
    **bags.RULES,
}


def rule_of(func: object) -> Rule | None:
    """Find the rule of an operator; None if nothing is known of it."""
    name = operator_name(func)
    rule = _RULES.get(name) or _RULES.get(name.removesuffix("_"))
    if rule is None and name.startswith("_foreach_"):
        return None
    if rule is None and torch.Tag.pointwise in getattr(func, "tags", ()):
        return pointwise.any_pointwise
    return rule
