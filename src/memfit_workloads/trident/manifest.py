"""Manifests of clips: one JSON object per line, checked before anything is trained. No torch.

All that a record says is checked here; the files that it names are checked by `recorded`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memfit.errors import DataError

from .record_fields import (
    GROUPS,
    PROMPT,
    FieldError,
    class_id,
    cut,
    files_of,
    group_of,
    kind,
    kinematics,
    label,
    number,
    shown,
    unused_keys,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Record:
    """One line of a manifest."""

    manifest: Path
    line: int
    files: dict[str, Path]
    """By key; only those that the record names."""
    kinematics: NDArray[np.float32]
    """(3, 9): x, y, z (m), vx, vy, vz (m/s), range (m), bearing, elevation (rad)."""
    class_id: int
    class_conf: float
    event: float
    severe: float
    prompt: str | None
    """Kept; no part of the model reads it."""
    unused: tuple[str, ...]
    """Keys that mean nothing here."""
    digest: str
    """Of what the line says."""

    def fault(self, reason: str) -> DataError:
        """Return an error that names the record."""
        return DataError(str(self.manifest), reason, self.line)


def read_manifest(path: Path, video_root: Path, num_classes: int) -> list[Record]:
    """Read and check all records.

    Args:
        path: the manifest.
        video_root: where relative paths of clips begin.
        num_classes: how many classes the model tells apart.

    Raises:
        DataError: that names the first line that is wrong, and counts the others.
    """
    records: list[Record] = []

    def read(line_number: int, line: bytes) -> None:
        try:
            told = _parsed(line)
            record = _record(told, num_classes)
            files = {key: video_root / value for key, value in files_of(told).items()}
            records.append(Record(manifest=path, line=line_number, files=files, **record))
        except FieldError as error:
            raise DataError(str(path), str(error), line_number) from None

    check_each((partial(read, *place), place[0]) for place in _lines(path))
    if not records:
        raise DataError(str(path), "there is no record in it; needed is one JSON object per line.")
    return records


def check_each(checks: Iterator[tuple[Callable[[], object], int]]) -> None:
    """Carry out a check for each line; the first that fails is the error, the others are counted.

    Raises:
        DataError: of the first line that is wrong.
    """
    first: DataError | None = None
    further: list[int] = []
    for check, line in checks:
        try:
            check()
        except DataError as error:
            if first is None:
                first = error
            else:
                further.append(line)
    if first is not None and further:
        many = "1 more line is" if len(further) == 1 else f"{len(further)} more lines are"
        msg = f"{first} ({many} wrong, the next is {further[0]}.)"
        first.args = (msg,)
    if first is not None:
        raise first


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that hold something, with their numbers.

    Raises:
        DataError: if the file cannot be read.
    """
    try:
        if path.is_dir():
            reason = "it is a folder; needed is a file with one JSON object per line."
            raise DataError(str(path), reason)
        if path.exists() and not path.is_file():
            raise DataError(str(path), "it is no regular file; needed is one that can be reopened.")
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                kept = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if kept.strip():
                    yield number, kept.strip()
    except OSError as error:
        reason = f"it cannot be read ({error.strerror}). Check the path and its permissions."
        raise DataError(str(path), reason) from None


def _parsed(line: bytes) -> dict[str, Any]:
    """Read one JSON object.

    Raises:
        FieldError: if the line is something else.
    """
    try:
        told = json.loads(line.decode(), object_pairs_hook=_without_twins)
    except UnicodeDecodeError as error:
        msg = f"it is no UTF-8 (byte {error.start + 1} of the line). Save the manifest as UTF-8."
        raise FieldError(msg) from None
    except RecursionError:
        msg = "it is no JSON (nested too deeply). Needed is one record per line."
        raise FieldError(msg) from None
    except _TwinKeyError as error:
        msg = f'found the key "{error}" twice in one object; leave one of them out.'
        raise FieldError(msg) from None
    except ValueError as error:
        what = str(error).partition(": line ")[0]
        column = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        msg = f"it is no JSON ({what}{column}). Needed is one record per line, closed on it."
        raise FieldError(msg) from None
    if not isinstance(told, dict):
        msg = f"found {kind(told)}; needed is one JSON object."
        raise FieldError(msg)
    return told


class _TwinKeyError(Exception):
    """Name a key that an object has twice."""


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _TwinKeyError(cut(key))
        found[key] = value
    return found


def _record(told: dict[str, Any], num_classes: int) -> dict[str, Any]:
    """Check what a line says, its files apart.

    Raises:
        FieldError: that says what was found and what is needed.
    """
    unused = unused_keys(told)
    groups = {name: group_of(told, name) for name in GROUPS}
    event, severe = (label(groups["labels"], name) for name in ("event", "severe"))
    if severe > event:
        msg = "labels.severe is 1 and labels.event 0; a severe event is an event. Correct one."
        raise FieldError(msg)
    number(groups["video"], "video.fps", "a number above 0", lambda value: value > 0)
    conf = number(
        groups["object"], "object.conf", "a number from 0 to 1", lambda value: 0 <= value <= 1
    )
    prompt = told.get(PROMPT)
    if prompt is not None and not isinstance(prompt, str):
        msg = f"prompt is {shown(prompt)}; needed is a text, or no prompt."
        raise FieldError(msg)
    canonical = json.dumps(told, sort_keys=True, separators=(",", ":"))
    return {
        "kinematics": kinematics(groups["motion"]),
        "class_id": class_id(groups["object"], num_classes),
        "class_conf": 1.0 if conf is None else conf,
        "event": event,
        "severe": severe,
        "prompt": prompt,
        "unused": unused,
        "digest": hashlib.sha256(canonical.encode(errors="surrogatepass")).hexdigest(),
    }
