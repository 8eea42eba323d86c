"""Write a file so that a reader sees the old one or the new one, never a part."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write bytes to a temporary file beside ``path`` and put it in its place.

    The temporary file is opened plainly, not with ``tempfile``, so that the report keeps the
    permissions that the user's umask gives to new files.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
