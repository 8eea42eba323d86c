"""Strategies stand alone: none imports another, and each names its source and its limits."""

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from memfit.strategies import CATALOGUE

PACKAGE = "memfit.strategies"
MODULES = sorted({strategy.__module__ for strategy in CATALOGUE})


def imported_modules(module: str, source: str) -> Iterator[str]:
    """Yield the full name of everything that a module of the package imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = ".".join(module.split(".")[: -node.level]) if node.level else ""
            origin = ".".join(filter(None, [parent, node.module]))
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def strategies_imported(module: str, source: str, modules: Iterable[str]) -> set[str]:
    """Find the strategy modules that a strategy module imports."""
    return set(imported_modules(module, source)) & (set(modules) - {module})


def missing_sections(docstring: str | None) -> list[str]:
    """Name the sections that a strategy's docstring lacks; a section needs a body."""
    return [
        section
        for section in ("Source", "Limits")
        if not re.search(
            rf"^\s*{section}:\s+(?!Source:|Limits:)\S", docstring or "", flags=re.MULTILINE
        )
    ]


@pytest.mark.parametrize("module", MODULES)
def test_no_strategy_imports_another(module: str) -> None:
    path = inspect.getsourcefile(next(s for s in CATALOGUE if s.__module__ == module))
    assert path is not None
    source = Path(path).read_text("utf-8")

    assert strategies_imported(module, source, MODULES) == set()


@pytest.mark.parametrize("strategy", CATALOGUE, ids=lambda strategy: strategy.__name__)
def test_every_strategy_documents_its_source_and_limits(strategy: type) -> None:
    assert missing_sections(strategy.__doc__) == []


@pytest.mark.parametrize("strategy", CATALOGUE, ids=lambda strategy: strategy.__name__)
def test_every_strategy_lives_in_the_package_in_a_file_of_its_own(strategy: type) -> None:
    assert strategy.__module__.startswith(f"{PACKAGE}.")


@pytest.mark.parametrize(
    "line",
    [
        "import memfit.strategies.other",
        "from memfit.strategies import other",
        "from memfit.strategies.other import Other",
        "from . import other",
        "from .other import Other",
        "def late():\n    from .other import Other",
    ],
)
def test_a_planted_import_of_another_strategy_is_found(line: str) -> None:
    modules = [f"{PACKAGE}.one", f"{PACKAGE}.other"]

    assert strategies_imported(f"{PACKAGE}.one", line, modules) == {f"{PACKAGE}.other"}
    assert strategies_imported(f"{PACKAGE}.one", "from .base import Strategy", modules) == set()


@pytest.mark.parametrize(
    ("docstring", "missing"),
    [
        (None, ["Source", "Limits"]),
        ("Save memory.\n\nSource: Chen et al. 2016.", ["Limits"]),
        ("Save memory.\n\nSource:\n    Chen et al. 2016.\n\nLimits:\n    None known.", []),
        ("Save memory.\n\nSource: Chen et al. 2016.\n\nLimits:\n", ["Limits"]),
        ("Save memory.\n\nSource:\nLimits: None known.", ["Source"]),
    ],
)
def test_a_missing_section_is_found(docstring: str | None, missing: list[str]) -> None:
    assert missing_sections(docstring) == missing
