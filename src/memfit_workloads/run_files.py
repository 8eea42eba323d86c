"""The files of one run: each written whole, under names that do not change."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import UsageError
from memfit.files import naming_full_disk, write_atomically
from memfit.journal.folder import JOURNAL_NAMES, clear_journal, has_own_facts, holds_journal
from memfit.journal.folder_lock import LOCK_NAME, hold_folder
from memfit.journal.plan_words import PLAN_WORDS_NAME
from memfit.reports.training import METRICS_NAME, TRAINING_NAME

_OUTPUTS = (
    *("config.json", "plan.yaml", PLAN_WORDS_NAME, METRICS_NAME, TRAINING_NAME),
    *("report.html", "run-peaks.png", "timeline.png"),
)
_CHECKPOINT_KINDS = ("checkpoint_*.pt", "*.ckpt")
_CHECKPOINT = re.compile(
    r"checkpoint_(epoch_\d+|interrupted)\.pt|(epoch=\d+-step=\d+|last)(-v\d+)?\.ckpt"
)
"""What the loop, and Lightning, call their checkpoints."""


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
            UsageError: if another run lies there that is not to be replaced, or goes on there, or
                what would be replaced is not memfit's.
        """
        fixed = [self.root / name for name in (*_OUTPUTS, *self.own, *JOURNAL_NAMES)]
        saved = [path for kind in _CHECKPOINT_KINDS for path in self.checkpoints.glob(kind)]
        earlier = [path for path in (*sorted(saved), *fixed) if path.exists()]
        if earlier and not overwrite:
            msg = (
                f"{self.root} already holds a run ({earlier[0].name}). Continue it with "
                f"{self.resume_flag}, replace it with --overwrite, or give another "
                f"{self.folder_flag}."
            )
            raise UsageError(msg)
        if earlier:
            self._check_own(earlier, saved)
        self._hold()
        for path in earlier:
            path.unlink()
        clear_journal(self.root, num_ranks=num_ranks)

    def _check_own(self, earlier: Sequence[Path], saved: Sequence[Path]) -> None:
        """Refuse to replace what memfit has not written."""
        foreign = [path for path in saved if not _CHECKPOINT.fullmatch(path.name)]
        foreign += [path for path in earlier if path.is_dir()]
        is_known = (self.root / LOCK_NAME).exists() or holds_journal(self.root)
        if not (is_known and has_own_facts(self.root)):
            foreign += earlier
        if foreign:
            msg = (
                f"{foreign[0]} is in the way, and no run of memfit has written it: --overwrite "
                f"replaces nothing there. Move it, or give another {self.folder_flag}."
            )
            raise UsageError(msg)

    def _hold(self) -> None:
        with naming_full_disk(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        hold_folder(self.root)

    def resume(self) -> None:
        """Make the folder ready to continue: what is final belongs to a run that has ended.

        Raises:
            UsageError: if a run goes on there.
        """
        self._hold()
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
        path = self.root / name
        with naming_full_disk(path), path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)

    def write_lines(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write one JSON value per line."""
        written = (json.dumps(line, allow_nan=False) + "\n" for line in lines)
        write_atomically(self.root / name, "".join(written))
