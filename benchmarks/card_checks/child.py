"""One task in a process of its own: ``python -m card_checks.child TASK.json RESULT.json``."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from memfit.files import write_atomically

from .guarding import guarded
from .measuring import carried_out
from .planning import planned


def main(words: list[str]) -> None:
    """Do what a file says and write what came of it."""
    task = json.loads(Path(words[0]).read_text(encoding="utf-8"))
    try:
        found = _done(task)
    except Exception as error:  # noqa: BLE001 - the parent is to read why
        found = {"error": f"{type(error).__name__}: {error}"[:1500]}
        found["trace"] = traceback.format_exc()[-2500:]
    write_atomically(Path(words[1]), json.dumps(found, default=str))


def _done(task: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(task.get("num_threads", 1))
    done = {"plan": planned, "guard": guarded, "carry out": carried_out}[task["do"]]
    return done(task)


if __name__ == "__main__":
    main(sys.argv[1:])
