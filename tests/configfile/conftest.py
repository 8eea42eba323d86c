"""A folder to work in, with a plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.configfile.corpus_cases import PLAN

from memfit.configfile.applying import apply_plan
from memfit.configfile.changes import Wishes


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Stand in a folder with plan.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.yaml").write_text(PLAN)
    return tmp_path


@pytest.fixture
def apply(folder):
    """Return a function that writes files and works out what the plan changes in them."""

    def run(*contents: tuple[str, str], write: bool = False, mapping: str = "", **wishes: int):
        for name, text in contents:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text.encode())
        if mapping:
            (folder / "mapping.toml").write_text(mapping)
        return apply_plan(
            Path("plan.yaml"),
            [Path(name) for name, _ in contents],
            Wishes(**wishes),
            Path("mapping.toml") if mapping else None,
            write=write,
        )

    return run
