"""The training loops of the benchmark of the guard, which is no installed package."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "benchmarks" / "guard_scenarios"
_PACKAGE = "guard_scenarios"


def load(name: str) -> ModuleType:
    """Import a module of the benchmark."""
    if _PACKAGE not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            _PACKAGE, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
        )
        sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[_PACKAGE])
    return importlib.import_module(f"{_PACKAGE}.{name}")
