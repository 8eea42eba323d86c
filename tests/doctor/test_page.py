"""The page of the doctor names what the doctor says."""

from __future__ import annotations

import re
from pathlib import Path

from tests.zoo.made_up_machine import MadeUpMachine, healthy

from memfit.doctor.finding import Status
from memfit.doctor.settings import _SETTINGS

PAGE = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text("utf-8")


def test_every_check_has_its_line(tmp_path):
    names = {each.name for each in healthy(tmp_path / "a").findings()}
    names |= {each.name for each in MadeUpMachine(tmp_path / "b").findings()}
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    assert not names - listed


def test_every_status_and_variable_is_explained():
    for name in [*Status, *(each.name for each in _SETTINGS if "VISIBLE" not in each.name)]:
        assert f"`{name}" in PAGE
