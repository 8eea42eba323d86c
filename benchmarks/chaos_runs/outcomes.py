"""What came of a story, and how an error has to name what was wrong."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chaos_runs.stories import Story

_WORDS = {
    errno.ENOSPC: "no space left",
    errno.EDQUOT: "quota exceeded",
    errno.EROFS: "read-only file system",
    errno.EIO: "input/output error",
}


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of a story.

    Args:
        story: that was carried out.
        violations: what did not hold, a sentence each.
        struck: where faults were met.
        ended: how each process ended.
        seconds: how long it took.
        unusable: why the story is none, such as a job that torch itself refuses.
        strategies: of its plan.
    """

    story: Story
    violations: list[str] = field(default_factory=list)
    struck: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    seconds: float = 0.0
    unusable: str = ""
    strategies: tuple[Mapping[str, Any], ...] = ()


def names_disk(said: str, number: int) -> bool:
    """Return whether words say what the system says of such a failure of a disk."""
    return _WORDS[number] in said.lower()
