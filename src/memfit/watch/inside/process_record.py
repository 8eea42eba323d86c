"""Keeps the last words of this process up to date."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from memfit.observe.processes import started_at
from memfit.watch.last_words import ErrorWords, LastWords, write_words

_MOST_ERRORS = 4
"""A script that tries smaller batches until one fits makes an error each time."""


class ProcessRecord:
    """Collect what this process has to say, and write it where the outer half finds it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.words = LastWords(process_id=os.getpid(), started_ticks=started_at(os.getpid()))
        self._write()

    def update(self, **fields: Any) -> None:
        """Change fields and write them."""
        self.words = replace(self.words, **fields)
        self._write()

    def note(self, text: str) -> None:
        """Say once what could not be watched."""
        if text not in self.words.notes:
            self.update(notes=(*self.words.notes, text))

    def add_error(self, error: ErrorWords) -> None:
        """Add an error; of many, the last are kept."""
        self.update(errors=(*self.words.errors, error)[-_MOST_ERRORS:])

    def _write(self) -> None:
        try:
            write_words(self._folder, self.words)
        except OSError:
            return  # the disk is full, or the folder has gone: nobody is left to tell
