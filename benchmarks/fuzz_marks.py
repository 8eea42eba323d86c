"""Notes that hostile content has had code run: nothing else calls this."""

from __future__ import annotations

RUNS: list[tuple[object, ...]] = []


def ran(*words: object) -> str:
    """Note it."""
    RUNS.append(words)
    return "ran"
