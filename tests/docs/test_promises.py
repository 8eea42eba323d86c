"""Each promise names a test that is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "promises.md").read_text("utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


def test_every_promise_has_a_test():
    rows = [row for row in PAGE.splitlines() if row.startswith("| ") and "fault" not in row]
    assert len(rows) > 20
    assert [row for row in rows if not re.search(r"`tests/[\w/]+\.py::\w+` \|$", row)] == []


@pytest.mark.parametrize(("file", "name"), NAMED, ids=lambda word: word.rpartition("/")[2])
def test_the_test_of_a_promise_exists(file, name):
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
