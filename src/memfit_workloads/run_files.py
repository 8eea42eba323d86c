"""The files of one run: each written whole, under names that do not change."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import UsageError
from memfit.files import write_atomically
from memfit.journal.folder import JOURNAL_NAMES, clear_journal
from memfit.reports.training import METRICS_NAME, TRAINING_NAME

_OUTPUTS = (
    *("config.json", "plan.yaml", METRICS_NAME, TRAINING_NAME),
    *("report.html", "run-peaks.png", "timeline.png"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Where a run's files lie."""

    root: Path
    checkpoints: Path

    own: Sequence[str]
    """What a system writes into the root besides the files of every run."""
    final: Sequence[str]
    """What only a run that came to its end has."""
    folder_flag: str = "--output-dir"
    resume_flag: str = "--resume-from-checkpoint auto"

    def begin(self, *, overwrite: bool, num_ranks: int = 1) -> None:
        """Make the folder ready for a new run, of so many ranks.

        Raises:
            UsageError: if another run lies there that is not to be replaced.
        """
        fixed = [self.root / name for name in (*_OUTPUTS, *self.own, *JOURNAL_NAMES)]
        earlier = [*sorted(self.checkpoints.glob("checkpoint_*.pt")), *fixed]
        earlier = [path for path in earlier if path.exists()]
        if earlier and not overwrite:
            msg = (
                f"{self.root} already holds a run ({earlier[0].name}). Continue it with "
                f"{self.resume_flag}, replace it with --overwrite, or give another "
                f"{self.folder_flag}."
            )
            raise UsageError(msg)
        for path in earlier:
            path.unlink()
        clear_journal(self.root, num_ranks=num_ranks)
        self.checkpoints.mkdir(parents=True, exist_ok=True)

    def resume(self) -> None:
        """Make the folder ready to continue: what is final belongs to a run that has ended."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        for name in self.final:
            (self.root / name).unlink(missing_ok=True)

    def write_json(self, name: str, content: Any) -> None:
        """Write a value as JSON; NaN and infinity are refused."""
        write_atomically(self.root / name, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def write(self, name: str, content: str | bytes) -> None:
        """Write a file whole."""
        write_atomically(self.root / name, content)

    def append(self, name: str, lines: Iterable[str]) -> None:
        """Add lines to a log, which can be followed while it grows."""
        with (self.root / name).open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)

    def write_lines(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write one JSON value per line."""
        written = (json.dumps(line, allow_nan=False) + "\n" for line in lines)
        write_atomically(self.root / name, "".join(written))
