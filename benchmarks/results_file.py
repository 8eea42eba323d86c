"""Where benchmarks keep their figures: one JSON file each, with the machine they ran on."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import torch

from memfit.files import write_atomically

RESULTS = Path(__file__).parent / "results"


def save_result(name: str, figures: dict[str, Any]) -> None:
    """Write the figures of one benchmark and print them."""
    content = write_result(name, figures)
    print(json.dumps({key: value for key, value in content.items() if key != "rows"}, indent=1))


def write_result(name: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Write the figures of one benchmark and give them with the machine they ran on."""
    content = {
        "benchmark": name,
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
        **figures,
    }
    write_atomically(RESULTS / f"{name}.json", json.dumps(content, indent=1) + "\n")
    return content


def load_result(name: str) -> dict[str, Any]:
    """Read the figures of one benchmark."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def commit_of(checkout: Path) -> str:
    """Return the commit that a checkout is at, and its date."""
    words = ["git", "-C", str(checkout), "log", "-1", "--format=%h of %cs"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
