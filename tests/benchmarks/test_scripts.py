"""The scripts of strangers are all in their table, stand alone, and have what was measured."""

import ast
import json
import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks" / "scripts"
PAGE = (FOLDER / "README.md").read_text("utf-8")
SCRIPTS = sorted(FOLDER.rglob("*.py"))


def top_level_names() -> set[str]:
    """Return the scripts, and a package by its folder."""
    attacks = [path.name for path in (FOLDER / "attack").glob("*.py")]
    packages = [f"{path.parent.name}/" for path in (FOLDER / "attack").glob("*/__init__.py")]
    return {path.name for path in FOLDER.glob("*.py")} | {*attacks, *packages}


def test_every_script_is_in_the_table_and_nothing_else_is() -> None:
    named = re.findall(r"^\| `([\w./]+)`", PAGE, flags=re.MULTILINE)

    assert set(named) == top_level_names()


def test_no_script_knows_what_it_is_held_against() -> None:
    for path in SCRIPTS:
        assert "memfit" not in path.read_text("utf-8").lower(), path


def test_every_script_goes_to_the_card_where_there_is_one() -> None:
    asks = re.compile(r"cuda\.is_available\(\)|Trainer\(|Accelerator\(")
    entries = [path for path in SCRIPTS if path.parent.name != "segment" or path.stem == "train"]

    for path in entries:
        ast.parse(path.read_text("utf-8"))
        assert asks.search(path.read_text("utf-8")), path


def test_the_page_shows_what_was_measured() -> None:
    rows = json.loads((FOLDER / "measured.json").read_text("utf-8"))

    assert {row["script"] for row in rows} == top_level_names()
    for row in rows:
        steps = row.get("step_peak_bytes") or [row["first_step_peak_bytes"]]
        assert len(steps) in {row["num_steps"], 1}
        assert steps[0] == row["first_step_peak_bytes"]
        assert (
            max(steps[1:], default=row["steady_step_peak_bytes"]) == row["steady_step_peak_bytes"]
        )
        shown = (row.get("evaluation_peak_bytes"), row["checkpoint_peak_bytes"])
        cells = [row["num_steps"], steps[0], row["steady_step_peak_bytes"], *shown]
        line = " | ".join("" if cell is None else f"{cell:,}" for cell in cells)
        assert f"| `{row['script']}` | {line} | " in PAGE
