"""Writes files so that a reader sees the old content or the new one, never a part."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a whole file, or leave it as it was."""
    data = content.encode() if isinstance(content, str) else content
    replace_atomically(path, lambda part: part.write_bytes(data))


def replace_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` fill a file beside ``path``, then put it in its place in one move."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part_name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    part = Path(part_name)
    try:
        write(part)
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.chmod(0o644)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
