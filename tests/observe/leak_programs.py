"""The programs of the benchmark of the leak finder, which is no installed package."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "benchmarks" / "leak_programs"
_PACKAGE = "memfit_benchmark_leak_programs"


def load(name: str) -> ModuleType:
    """Import a module of the benchmark."""
    if _PACKAGE not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            _PACKAGE, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
        )
        sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[_PACKAGE])
    return importlib.import_module(f"{_PACKAGE}.{name}")
