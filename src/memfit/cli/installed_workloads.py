"""The workloads, which the library never needs: imported by name where they are asked for."""

from __future__ import annotations

import importlib
from typing import Any

from memfit.errors import UsageError

_WORKLOADS = "memfit_workloads"


def workloads_module(name: str = "") -> Any:
    """Import the package of workloads, or a module of it by its dotted name.

    Raises:
        UsageError: if they are not installed.
    """
    path = f"{_WORKLOADS}.{name}" if name else _WORKLOADS
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != _WORKLOADS:
            raise
        msg = "The workloads are not installed; they come with memfit: pip install memfit."
        raise UsageError(msg) from None
