"""Finds the code that rebuilds a row of the collection, by its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from accuracy.packages import CannotRebuild

from . import fsdp_qlora, lightning, litgpt, torchtitan, trainer
from .steps import PublishedStep, refuse_compiled

if TYPE_CHECKING:
    from accuracy.rows import Row


def _refused(reason: str) -> Callable[[Mapping[str, Any]], PublishedStep]:
    """Return what says why rows of a source are not rebuilt."""

    def refuse(fields: Mapping[str, Any]) -> PublishedStep:
        refuse_compiled(fields)
        raise CannotRebuild(reason)

    return refuse


_REBUILDERS: Mapping[str, Callable[[Mapping[str, Any]], PublishedStep]] = {
    "Lightning": lightning.rebuilt,
    "fms-acceleration": trainer.rebuilt,
    "fsdp_qlora": fsdp_qlora.rebuilt,
    "litgpt": litgpt.rebuilt,
    "lightning-thunder": _refused("no code builds its model"),
    "peft": _refused("the lengths of its batches are not stated, and they decide"),
    "torchao": _refused("whether it was compiled, and the optimizer, are not stated"),
    "torchtitan": torchtitan.rebuilt,
    "torchtune": _refused("the lengths of its batches or the optimizer are not stated"),
}


def rebuild_published(row: Row) -> PublishedStep:
    """Rebuild a row of the collection.

    Raises:
        CannotRebuild: if its source is not known here, or the row lacks something.
    """
    if row.source not in _REBUILDERS:
        raise CannotRebuild(f"there is no code that rebuilds rows of {row.source}")
    return _REBUILDERS[row.source](row.published)
