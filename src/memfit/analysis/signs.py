"""Tells of which results it is known that they hold no negative number, as labels must not."""

from __future__ import annotations

import torch

from memfit.analysis.dataflow import Ref
from memfit.analysis.flow import Flow
from memfit.analysis.use import Use

_NEVER = frozenset({"abs", "argmax", "argmin", "argsort", "square", "count_nonzero"})


def with_sign(use: Use, result: Ref, flow: Flow) -> Flow:
    """Note of a result that it is never negative, where that is known."""
    if flow.is_bad or flow.sources is not None or not _is_never_negative(use, result, flow):
        return flow
    return flow.with_sources(frozenset())


def _is_never_negative(use: Use, result: Ref, flow: Flow) -> bool:
    if use.shape_of(result).dtype is torch.bool or use.name.removesuffix("_") in _NEVER:
        return True
    if flow.is_uniform and flow.value is not None:
        return flow.value >= 0
    name = use.name.removesuffix("_")
    lowest = {"remainder": "other", "clamp": "min", "clamp_min": "min", "randint": "low"}.get(name)
    if lowest is None or not use.has(lowest):
        return name == "randint" and not use.has("low")
    number = use.argument(lowest)
    return isinstance(number, (int, float)) and number >= 0
