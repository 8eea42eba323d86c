"""Checks on a batch what a proof takes for granted of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from memfit.analysis.separability import NeverHolds
from memfit.session.batches import BatchLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenCondition:
    """A value that a part of a batch may not hold, and how often it does."""

    name: str
    """The part, such as ``batch['labels']``."""
    value: int
    num_entries: int

    @property
    def sentence(self) -> str:
        """Return what was found, and what to do."""
        times = "once" if self.num_entries == 1 else f"{self.num_entries:,} times"
        return (
            f"{self.name} holds {self.value} {times}; the loss's mean leaves such entries out, so "
            "samples have different weights in it and pieces would train something else. Return "
            "memfit.Total(sum, count) from the loss, which pieces weight by their true counts."
        )


def broken_condition(
    layout: BatchLayout, batch: Any, conditions: Iterable[NeverHolds]
) -> BrokenCondition | None:
    """Return the first condition that a batch does not keep to; None if it keeps to all.

    Tensors on a GPU are waited for.
    """
    for condition in conditions:
        leaf = layout.leaf_of(batch, condition.leaf)
        if not isinstance(leaf, torch.Tensor):
            continue
        if num_entries := int((leaf == condition.value).sum()):
            name = layout.name_of(condition.leaf)
            return BrokenCondition(name=name, value=condition.value, num_entries=num_entries)
    return None
