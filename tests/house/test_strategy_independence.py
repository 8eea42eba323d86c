"""Strategies stand alone: none imports another, and each names its source and its limits."""

import re

import grimp
import pytest

from memfit.strategies import CATALOGUE

PACKAGE = "memfit.strategies"


def missing_sections(docstring: str | None) -> list[str]:
    """Name the sections that a strategy's docstring lacks; a section needs a body."""
    return [
        section
        for section in ("Source", "Limits")
        if not re.search(
            rf"^\s*{section}:\s+(?!Source:|Limits:)\S", docstring or "", flags=re.MULTILINE
        )
    ]


def test_no_strategy_imports_another() -> None:
    graph = grimp.build_graph("memfit", cache_dir=None)
    modules = {strategy.__module__ for strategy in CATALOGUE}
    found = {each: graph.find_modules_directly_imported_by(each) & modules for each in modules}

    assert {each: others for each, others in found.items() if others} == {}


@pytest.mark.parametrize("strategy", CATALOGUE, ids=lambda strategy: strategy.__name__)
def test_every_strategy_documents_its_source_and_limits(strategy: type) -> None:
    assert missing_sections(strategy.__doc__) == []


@pytest.mark.parametrize("strategy", CATALOGUE, ids=lambda strategy: strategy.__name__)
def test_every_strategy_lives_in_the_package_in_a_file_of_its_own(strategy: type) -> None:
    assert strategy.__module__.startswith(f"{PACKAGE}.")


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
