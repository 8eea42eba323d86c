"""Torch versions as the data files of this package write them: ``"2.13"`` is ``(2, 13)``."""

from __future__ import annotations

Version = tuple[int, ...]


def as_version(text: str) -> Version:
    """Read ``2.13`` or a compute capability such as ``9.0`` as a tuple of numbers."""
    return tuple(int(part) for part in text.split("."))
