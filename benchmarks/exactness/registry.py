"""Lists all cases."""

from __future__ import annotations

import importlib
import pkgutil

from exactness import cases
from exactness.case import Case


def all_cases() -> tuple[Case, ...]:
    """Return all cases, the blind half first."""
    names = sorted(module.name for module in pkgutil.iter_modules(cases.__path__))
    themes = [importlib.import_module(f"{cases.__name__}.{name}").theme for name in names]
    found = [case for theme in themes for case in theme.cases]
    return tuple(sorted(found, key=lambda case: case.half))


def find_case(name: str) -> Case:
    """Return the case of a name.

    Raises:
        KeyError: if there is none.
    """
    return {case.name: case for case in all_cases()}[name]
