"""Types a command as a user would, in a folder of its own, and says what came of it."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_MOST_SECONDS = 1800
_PEAKS = re.compile(r"peak: predicted ([\d.,]+ \w+).*?measured ([\d.,]+ \w+)")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A command of a document."""

    document: str
    """As it stands there, on one line."""
    typed: str
    """With memfit's names in place of the document's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What is typed of a document."""

    workload: str
    lines: tuple[Line, ...]
    prepare: Callable[[Path], None]
    """Put the files into an empty folder that the document takes for granted."""
    is_one_folder: bool = False
    """Whether lines find what the ones before them have written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a line gave."""

    document: str
    typed: str
    exit_code: int
    processor_seconds: float
    said: str
    """The peaks where it ended well and has some, else the last line that it wrote."""


def type_line(line: Line, folder: Path) -> Outcome:
    """Run one line in a shell, with this Python and what is installed beside it first on the path.

    Raises:
        subprocess.TimeoutExpired: if it takes half an hour.
    """
    beside = Path(sys.executable).parent
    variables = {**os.environ, "PATH": f"{beside}:{os.environ['PATH']}", "COLUMNS": "200"}
    before = _processor_seconds()
    ran = subprocess.run(
        ["bash", "-c", line.typed],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=_MOST_SECONDS,
        stdin=subprocess.DEVNULL,
    )
    return Outcome(
        document=line.document,
        typed=line.typed,
        exit_code=ran.returncode,
        processor_seconds=round(_processor_seconds() - before, 1),
        said=_said(ran, folder),
    )


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _said(ran: subprocess.CompletedProcess[str], folder: Path) -> str:
    """Return the line that says what came of it."""
    text = _ESCAPES.sub("", ran.stdout + "\n" + ran.stderr).replace(f"{folder}/", "")
    found = _PEAKS.search(text)
    if found and ran.returncode == 0:
        return f"predicted {found[1]}, measured {found[2]}"
    last = ran.stderr if ran.returncode else ran.stdout
    lines = [each.strip() for each in _ESCAPES.sub("", last).splitlines() if each.strip()]
    return lines[-1].replace(f"{folder}/", "") if lines else ""
