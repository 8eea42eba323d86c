"""Finds the code that rebuilds a row of the collection, by its source."""

from __future__ import annotations

from ..packages import CannotRebuild
from ..rows import Row
from . import lightning, litgpt, torchtitan, trainer
from .steps import PublishedStep

_REBUILDERS = {
    "Lightning": lightning.rebuilt,
    "litgpt": litgpt.rebuilt,
    "fms-acceleration": trainer.rebuilt,
    "torchtitan": torchtitan.rebuilt,
}


def rebuild_published(row: Row) -> PublishedStep:
    """Rebuild a row of the collection.

    Raises:
        CannotRebuild: if its source is not known here, or the row lacks something.
    """
    if row.source not in _REBUILDERS:
        raise CannotRebuild(f"there is no code that rebuilds rows of {row.source}")
    return _REBUILDERS[row.source](row.published)
