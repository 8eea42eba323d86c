"""The files that the document's commands name, and that ship beside the workload."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "conf"
TASKS, DEEPSPEED = "tasks.yml", "ds_config.json"


def found(path: Path) -> tuple[Path, str | None]:
    """Return a file, or the shipped one of its name where there is none, and what to say then.

    Only the bare names of the files that ship are looked for there.
    """
    if path.exists() or str(path) not in {TASKS, DEEPSPEED}:
        return path, None
    shipped = FOLDER / path
    return shipped, f"{path}: there is none in this folder; the one that ships is used, {shipped}"
