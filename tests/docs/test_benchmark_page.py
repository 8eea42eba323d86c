"""The benchmark page shows the results that are in the repository."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_page_is_that_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    write_page = importlib.import_module("write_page")
    page = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    assert page == write_page.page_text(), "run: python benchmarks/write_page.py"
    readme = (ROOT / "README.md").read_text("utf-8")
    assert readme == write_page.with_figures(readme), "run: python benchmarks/write_page.py"
