"""What a run's plan is called, beside its file, so that a report need not build its strategies.

To build them takes torch, and that seconds. The words count only as long as the plan's file is the
one that they were written for.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memfit.errors import DataError
from memfit.files import write_atomically

from .folder import PLAN_NAME
from .plain_text import parsed_json, read_written

PLAN_WORDS_NAME = "plan-words.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPlan:
    """The plan in a run folder: its strategies, and those of ever smaller plans in reserve."""

    strategies: tuple[str, ...]
    numerics: str
    ladder: tuple[tuple[str, ...], ...]


def write_plan_words(folder: Path, plan: KnownPlan) -> None:
    """Write what the plan in a run folder is called."""
    content = {
        "checksum": _checksum(folder),
        "strategies": plan.strategies,
        "numerics": plan.numerics,
        "ladder": plan.ladder,
    }
    write_atomically(folder / PLAN_WORDS_NAME, json.dumps(content) + "\n")


def read_plan_words(folder: Path) -> KnownPlan | None:
    """Read what the plan in a run folder is called; None where that is not known of this file."""
    try:
        content = parsed_json(read_written(folder / PLAN_WORDS_NAME))
        if content["checksum"] != _checksum(folder):
            return None
        return KnownPlan(
            strategies=_words(content["strategies"]),
            numerics=str(content["numerics"]),
            ladder=tuple(map(_words, content["ladder"])),
        )
    except (OSError, DataError, ValueError, KeyError, TypeError):
        return None


def _words(labels: Sequence[object]) -> tuple[str, ...]:
    return tuple(map(str, labels))


def _checksum(folder: Path) -> int:
    return zlib.crc32(read_written(folder / PLAN_NAME).encode())
