"""The import contract in pyproject.toml refuses what it is there to refuse."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


PLANTED = {
    "memfit/units.py": "import memfit.errors\nimport torch",
    "memfit/trace/events.py": "import memfit.cli.main",
    "memfit/devices/spec.py": "import memfit.trace.events",
    "memfit/unplaced.py": "'A module without a layer.'",
    "memfit/figures.py": "import memfit_workloads",
    "memfit/cost/planted.py": "def f() -> None:\n    import torch",
}
REFUSED = {
    "Imports go one way": {
        "memfit.units -> memfit.errors",
        "memfit.trace.events -> memfit.cli.main",
        "memfit.devices.spec -> memfit.trace.events",
        "memfit.unplaced",
    },
    "The library never imports the workloads": {"memfit.figures -> memfit_workloads"},
    "What computes on data never imports torch": {
        "memfit.cost.planted -> torch",
        "memfit.units -> torch",
    },
}


def refused_imports(source_folder: Path) -> dict[str, set[str]]:
    """Run all contracts over the packages in a folder; return what each refuses."""
    done = subprocess.run(
        [
            *(sys.executable, "-c", LINT, "--no-cache", "--no-logo"),
            *("--config", str(ROOT / "pyproject.toml")),
        ],
        env=os.environ | {"PYTHONPATH": str(source_folder)},
        cwd=source_folder,
        capture_output=True,
        text=True,
        check=False,
    )
    parts = re.split(r"^(.+)\n-{3,}$", done.stdout, flags=re.MULTILINE)
    broken = dict(zip(parts[1::2], parts[2::2], strict=True))
    words = re.compile(r"^- +([\w.]+(?: -> [\w.]+)?)", re.MULTILINE)
    return {name: set(words.findall(text)) for name, text in broken.items() if words.search(text)}


def test_planted_imports_are_refused_and_no_others(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("datasets", "*.egg-info")
    source_copy = Path(shutil.copytree(ROOT / "src", tmp_path / "src", ignore=ignored))
    for file, lines in PLANTED.items():
        with (source_copy / file).open("a", encoding="utf-8") as planted:
            planted.write(f"\n{lines}\n")

    assert refused_imports(source_copy) == REFUSED


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
