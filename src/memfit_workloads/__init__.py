"""Complete training systems on top of memfit, each with its model, data and results."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

from memfit.errors import UsageError

if TYPE_CHECKING:
    from memfit_workloads.workload import Workload


def workload_names() -> tuple[str, ...]:
    """Return the names of all workloads, sorted, as they are typed after ``memfit train``."""
    packages = (entry.name for entry in pkgutil.iter_modules(__path__) if entry.ispkg)
    return tuple(sorted(package.replace("_", "-") for package in packages))


def load_workload(name: str) -> Workload:
    """Import a workload by its name; torch is imported only when the workload runs.

    Raises:
        UsageError: if there is no such workload.
    """
    if name not in workload_names():
        msg = f"No workload named {name!r}. There are: {', '.join(workload_names())}."
        raise UsageError(msg)
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    workload: Workload = module.WORKLOAD
    return workload
