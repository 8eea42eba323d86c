"""Reads a user's JSON and TOML within bounds: what is no file of memfit's is told at once.

A text of a few lines can ask for more than a machine has: aliases within aliases multiply, brackets
within brackets go deeper than Python counts, a number has a million digits.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tomllib
from itertools import accumulate
from pathlib import Path
from typing import Any

from memfit.errors import DataError
from memfit.units import MIB

MOST_BYTES = MIB
"""Of a plan, or a file with settings."""
_MOST_WRITTEN_BYTES = 4 * MIB
"""Of a file that a run writes whole; six times the largest that were seen."""
_MOST_ENTRIES = 20_000
_MOST_BRACKETS = 64
_BRACKET, _KEY_END = re.compile(r"[\[\]{}]"), re.compile(r"[=,{\n]")
_NUMBER = re.compile(r"[0-9a-fA-F_]{4000}")
TOO_DEEP = "it is nested too deeply"


def read_plain(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Read a text file that somebody may have written by hand.

    Raises:
        OSError: if there is none, or it cannot be opened.
        ValueError: if it is too large, no regular file, or not written in UTF-8.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        msg = "it is no regular file"  # a pipe would never end
        raise ValueError(msg)
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        msg = f"it is larger than {most_bytes:,} bytes"
        raise ValueError(msg)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        msg = f"it is not written in UTF-8 (byte {error.start})"
        raise ValueError(msg) from None


def read_written(path: Path) -> str:
    """Read a text file that memfit has written, which is large where it holds timelines.

    Raises:
        DataError: if it is far larger than that, no regular file, or not written in UTF-8.
    """
    try:
        return read_plain(path, _MOST_WRITTEN_BYTES)
    except ValueError as error:
        raise DataError(str(path), str(error)) from None


def parsed_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: if it is none, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def parsed_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: if it is none, or is nested too deeply.
    """
    check_extent(text)
    if any(part.count(".") > _MOST_BRACKETS for part in _KEY_END.split(text)):
        msg = "it has a key of too many parts"
        raise ValueError(msg)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def check_extent(
    text: str, *, most_characters: int = MOST_BYTES, most_entries: int = _MOST_ENTRIES
) -> None:
    """Refuse a text of more entries than anybody writes, before it is parsed.

    Raises:
        ValueError: with how many there may be.
    """
    if len(text) > most_characters:
        msg = f"it is longer than {most_characters:,} characters"
        raise ValueError(msg)
    if _NUMBER.search(text):
        msg = "it has a number of thousands of digits"
        raise ValueError(msg)
    depths = accumulate(1 if sign in "[{" else -1 for sign in _BRACKET.findall(text))
    if max(depths, default=0) > _MOST_BRACKETS:
        raise ValueError(TOO_DEEP)
    entries = sum(map(text.count, ("\n", ",", "{", "[")))
    if entries > most_entries:
        msg = f"it has {entries:,} entries or lines, and at most {most_entries:,} are read"
        raise ValueError(msg)
