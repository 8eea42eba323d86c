"""The tree keeps its shape: no circle, no crumbs, few files at the top and in each flat folder."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
LEAST_LINES = 30
MOST_FILES_AT_THE_TOP = 9
MOST_FILES = {"src/memfit/runtime": 15, "src/memfit/runtime/guard": 15}

Imports = Mapping[str, Collection[str]]

# What is smaller than a module is, or larger than a folder; to be mended, so this only shrinks.
EXCEPTIONS: dict[str, str] = {
    "memfit.__main__": "Python wants it to have a file of its own",
    "memfit_workloads.trident.__main__": "Python wants it to have a file of its own",
}


@cache
def imports_of_the_sources() -> dict[str, set[str]]:
    """Return what each module imports when it runs; types that it only names are left out."""
    graph = grimp.build_graph(
        "memfit", "memfit_workloads", exclude_type_checking_imports=True, cache_dir=None
    )
    modules = graph.modules - {"memfit"}  # which names everything, lazily
    return {each: graph.find_modules_directly_imported_by(each) & modules for each in modules}


def circle(imports: Imports) -> list[str]:
    """Return the modules of a circle of imports, or nothing."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def crumbs(imports: Imports, num_lines: Mapping[str, int]) -> Iterator[str]:
    """Yield each short module that at most one other imports."""
    for module, lines in num_lines.items():
        importers = [each for each, imported in imports.items() if module in imported]
        if lines < LEAST_LINES and len(importers) < 2:
            yield module


def lines_of_modules() -> dict[str, int]:
    """Count the lines of each module, without those that open a package."""
    files = (file for file in (ROOT / "src").rglob("*.py") if file.name != "__init__.py")
    return {
        ".".join(file.relative_to(ROOT / "src").with_suffix("").parts): len(
            file.read_text("utf-8").splitlines()
        )
        for file in files
    }


def crowded(root: Path) -> Iterator[str]:
    """Yield each folder that holds more files than it may."""
    for folder, most in MOST_FILES.items():
        if len(list((root / folder).glob("*.py"))) > most:
            yield folder


def test_imports_make_no_circle() -> None:
    assert not circle(imports_of_the_sources())


def test_no_module_is_a_crumb_and_no_folder_crowded() -> None:
    found = {*crumbs(imports_of_the_sources(), lines_of_modules()), *crowded(ROOT)}

    assert not found - EXCEPTIONS.keys(), "merge these, or split the folder"
    assert not EXCEPTIONS.keys() - found, "these are mended: take them out of EXCEPTIONS"


def test_few_files_lie_at_the_top_of_the_package() -> None:
    top = [path.name for path in (ROOT / "src" / "memfit").iterdir() if path.is_file()]

    assert len(top) <= MOST_FILES_AT_THE_TOP, top


@pytest.mark.parametrize(
    ("imports", "is_circle"),
    [({"a": ["b"], "b": ["c"], "c": ["a"]}, True), ({"a": ["b", "c"], "b": ["c"]}, False)],
)
def test_a_planted_circle_is_found(imports: Imports, is_circle: bool) -> None:
    assert bool(circle(imports)) == is_circle


def test_a_planted_crumb_is_found() -> None:
    imports = {"a": {"short", "shared"}, "b": {"shared", "long"}}

    assert list(crumbs(imports, {"short": 29, "shared": 29, "long": 30})) == ["short"]


def test_a_planted_crowd_is_found(tmp_path: Path) -> None:
    (folder := tmp_path / "src/memfit/runtime").mkdir(parents=True)
    for number in range(16):
        (folder / f"a{number}.py").touch()

    assert list(crowded(tmp_path)) == ["src/memfit/runtime"]
