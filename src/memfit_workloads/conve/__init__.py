"""ConvE: link prediction in a knowledge graph, with an exact one-to-many loss in bounded memory."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memfit_workloads.workload import Workload

from .arguments import add_arguments
from .settings import settings_from

if TYPE_CHECKING:
    from .entries import train_epoch as train_epoch
    from .entries import train_model as train_model

_ENTRIES = ("train_epoch", "train_model")


def __getattr__(name: str) -> Any:
    """Import the functions for scripts when they are asked for."""
    if name in _ENTRIES:
        return getattr(importlib.import_module(".entries", __name__), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


WORKLOAD = Workload(
    name="conve",
    summary="ConvE: predict missing links of a knowledge graph",
    add_arguments=add_arguments,
    settings_from=settings_from,
    package=__name__,
)
