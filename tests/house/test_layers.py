"""The import contract in pyproject.toml refuses what it is there to refuse."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint_imports(source_folder: Path, contract: str) -> tuple[int, str]:
    """Run one contract over the packages in a folder; return the exit code and the output."""
    done = subprocess.run(
        [
            *(sys.executable, "-c", LINT, "--no-cache", "--no-logo"),
            *("--config", str(ROOT / "pyproject.toml"), "--contract", contract),
        ],
        env=os.environ | {"PYTHONPATH": str(source_folder)},
        cwd=source_folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def source_copy(tmp_path: Path) -> Path:
    """Copy the sources, so that a fault can be planted in them."""
    return Path(
        shutil.copytree(
            ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("datasets", "*.egg-info")
        )
    )


@pytest.mark.parametrize(
    ("contract", "file", "line"),
    [
        ("layers", "memfit/units.py", "import memfit.errors"),
        ("layers", "memfit/trace/events.py", "import memfit.cli.main"),
        ("layers", "memfit/devices/spec.py", "import memfit.trace.events"),
        ("layers", "memfit/unplaced.py", "'''A module without a layer.'''"),
        ("workloads", "memfit/figures.py", "import memfit_workloads"),
        ("no-torch", "memfit/cost/planted.py", "def f() -> None:\n    import torch"),
        ("no-torch", "memfit/units.py", "import torch"),
    ],
)
def test_a_planted_import_is_refused(
    source_copy: Path, contract: str, file: str, line: str
) -> None:
    with (source_copy / file).open("a", encoding="utf-8") as planted:
        planted.write(f"\n{line}\n")

    code, output = lint_imports(source_copy, contract)

    assert code == 1, output
    assert "BROKEN" in output


def test_the_sources_keep_every_contract() -> None:
    for contract in ("layers", "workloads", "no-torch"):
        code, output = lint_imports(ROOT / "src", contract)
        assert code == 0, output


def test_the_documents_list_the_rooms_in_the_order_of_the_contract() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each["id"] == "layers")
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    table = page[page.index("| package | holds |") : page.index("At the top of the package")]
    rows = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in table.splitlines()[2:] if row]
    rooms = {path.parent.name for path in (ROOT / "src" / "memfit").glob("*/__init__.py")}
    expected = [[name for name in re.findall(r"\w+", layer) if name in rooms] for layer in layers]
    places = {name: place for place, names in enumerate(expected) for name in names}

    assert sorted(name for row in rows for name in row) == sorted(rooms)
    found = [places[name] for row in rows for name in row]
    assert found == sorted(found)
