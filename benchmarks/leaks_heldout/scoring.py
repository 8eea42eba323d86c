"""Runs a program as users do, and compares what was told with what its author planted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memfit.journal.folder import read_journal
from memfit.journal.records import LeakEvent

HERE = Path(__file__).parent
MARK = "# leaks here"
MOST_SECONDS = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A script, and what should be told of it."""

    name: str
    path: Path
    holders: tuple[str, ...]
    """Any of them is right; a path that begins with a dot may be reached from anywhere."""
    lines: tuple[int, ...]
    is_started: bool
    """Whether it calls ``memfit.start`` itself; others are run with ``memfit run``."""

    @property
    def leaks(self) -> bool:
        """Return whether anything should be told at all."""
        return bool(self.holders)

    def is_held_by(self, holder: str) -> bool:
        """Return whether a holder is the planted one, or lies within it."""
        own = holder.removeprefix("__main__.")
        return any(
            re.search(rf"(?:^|\.){re.escape(each.lstrip('.'))}(?:$|[.\[])", own)
            for each in self.holders
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What was told of a program."""

    name: str
    leaks: bool
    named: bool
    line: str
    """``right``, ``wrong``, or empty where none was given."""
    kind: str
    step: int
    others: tuple[str, ...]
    """What was told besides."""
    run_seconds: float


def programs() -> list[Program]:
    """Return all programs, those that leak first."""
    paths = [*sorted((HERE / "leaks").glob("*.py")), *sorted((HERE / "clean").glob("*.py"))]
    return [_program(path) for path in paths]


def _program(path: Path) -> Program:
    text = path.read_text()
    holder = re.search(r"^holder: (.*)$", text, re.MULTILINE)
    return Program(
        name=path.stem,
        path=path,
        holders=tuple(holder[1].split(" | ")) if holder else (),
        lines=tuple(n for n, line in enumerate(text.splitlines(), 1) if MARK in line),
        is_started="\ndriver: start\n" in text,
    )


def run(program: Program, folder: Path) -> tuple[LeakEvent, ...]:
    """Run a program at default settings, and give what its journal has of leaks.

    Raises:
        subprocess.CalledProcessError: if it failed.
        RuntimeError: if watching failed.
    """
    script = [sys.executable, str(program.path)]
    watched = [sys.executable, "-m", "memfit", "run", "--folder", str(folder), "--quiet", "--"]
    subprocess.run(
        script if program.is_started else [*watched, *script],
        env={**os.environ, "RUN_FOLDER": str(folder)},
        check=True,
        capture_output=True,
        timeout=MOST_SECONDS,
    )
    journal = read_journal(folder)
    ended = [each for each in journal.ending.evidence if "watching ended" in each]
    if ended:  # silence is no good score
        raise RuntimeError(ended[0])
    return tuple(event for event in journal.events if isinstance(event, LeakEvent))


def score(program: Program, folder: Path) -> Score:
    """Run a program and judge what was told of it."""
    began = time.monotonic()
    events = run(program, folder)
    right = [event for event in events if program.is_held_by(event.holder)]
    first = right[0] if right else None
    return Score(
        name=program.name,
        leaks=program.leaks,
        named=first is not None,
        line=_line(program, first) if first else "",
        kind=first.kind if first else "",
        step=first.step if first else 0,
        others=tuple(_words(event) for event in events if event not in right),
        run_seconds=round(time.monotonic() - began, 1),
    )


def _line(program: Program, event: LeakEvent) -> str:
    if not event.source_line:
        return ""
    file, _, number = event.source_line.rpartition(":")
    is_right = Path(file).name == program.path.name and int(number) in program.lines
    return "right" if is_right else f"wrong: {event.source_line}"


def _words(event: LeakEvent) -> str:
    return f"{event.kind} {event.holder} at {event.source_line or 'no line'}, step {event.step}"


def summary(scores: list[Score]) -> dict[str, Any]:
    """Count what was named, missed and wrongly told."""
    leaks = [each for each in scores if each.leaks]
    clean = [each for each in scores if not each.leaks]
    return {
        "num_leaks": len(leaks),
        "num_named": sum(each.named for each in leaks),
        "missed": [each.name for each in leaks if not each.named],
        "num_lines_right": sum(each.line == "right" for each in leaks),
        "lines_wrong": [each.name for each in leaks if each.line.startswith("wrong")],
        "told_besides": [each.name for each in leaks if each.others],
        "num_clean": len(clean),
        "num_false_alarms": sum(bool(each.others) for each in clean),
        "false_alarms": [each.name for each in clean if each.others],
        "rows": [asdict(each) for each in scores],
    }
