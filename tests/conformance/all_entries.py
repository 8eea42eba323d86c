"""Every strategy's entry in the conformance suite, gathered from the files of their families."""

from __future__ import annotations

from . import entries_first
from .builders import Entry

ENTRIES: tuple[Entry, ...] = (*entries_first.ENTRIES,)
