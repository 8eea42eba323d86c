"""WPO-SGM: a kernel score model with learned precisions, streamed exactly over its centres."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memfit_workloads.workload import Workload

from .arguments import add_arguments
from .settings import settings_from

if TYPE_CHECKING:
    from .setups import setup_chunked_training as setup_chunked_training
    from .setups import setup_gradient_accumulation_training as setup_gradient_accumulation_training
    from .setups import setup_model_parallel_training as setup_model_parallel_training

_SETUPS = (
    "setup_chunked_training",
    "setup_gradient_accumulation_training",
    "setup_model_parallel_training",
)


def __getattr__(name: str) -> Any:
    """Import the set-ups for existing scripts when they are asked for; they need torch."""
    if name in _SETUPS:
        return getattr(importlib.import_module(".setups", __name__), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


WORKLOAD = Workload(
    name="wpo-sgm",
    summary="WPO-SGM: a kernel score model over thousands of centres",
    add_arguments=add_arguments,
    settings_from=settings_from,
    package=__name__,
)
