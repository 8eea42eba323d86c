"""What is fuzzed: a reader, with files that it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """What reads a kind of file."""

    title: str
    name: str
    """Of the file, below a folder."""
    read: Callable[[Path], object]
    contents: Callable[[], tuple[bytes, ...]]
    """Files that it reads."""
    beside: tuple[tuple[str, bytes], ...] = ()
    """Files that have to lie beside, which stay as they are."""
    most_seconds: float = 1.0


def of(*contents: bytes) -> Callable[[], tuple[bytes, ...]]:
    """Return what gives these files."""
    return lambda: contents
