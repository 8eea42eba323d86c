"""The file that a scan goes on from: how far it is, and what it has kept, written in one move."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.errors import DataError, OtherScanError
from memfit.files import write_atomically
from memfit.journal.plain_text import parsed_json

_FILE = "progress.npz"
_FACTS = "facts"
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(slots=True, kw_only=True, eq=False)
class ScanState:
    """How far a scan is."""

    facts: Mapping[str, Any]
    """What makes it this scan: numbers, names and settings, as JSON has them."""
    num_done: int = 0
    """Steps done."""
    checksums: dict[str, int] = field(default_factory=dict)
    """Of the weights of each checkpoint that was begun, by its place."""
    arrays: Arrays = field(default_factory=dict)
    """What is kept besides the files of sums."""

    def save(self, folder: Path) -> None:
        """Write it, whole or not at all.

        Raises:
            DataError: if it cannot be written.
        """
        about = {
            "facts": dict(self.facts),
            "num_done": self.num_done,
            "checksums": self.checksums,
        }
        written = io.BytesIO()
        text = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
        everything: dict[str, Any] = {_FACTS: text, **self.arrays}
        np.savez(written, **everything)
        try:
            write_atomically(folder / _FILE, written.getvalue())
        except OSError as error:
            reason = f"it cannot be written ({error.strerror}). What was there before is whole"
            raise DataError(str(folder / _FILE), reason) from None


def opened_state(folder: Path | None, facts: Mapping[str, Any]) -> ScanState:
    """Read the state of a scan in a folder; a new one where there is none.

    Raises:
        DataError: if the file cannot be read.
        OtherScanError: if it is that of another scan.
    """
    path = None if folder is None else folder / _FILE
    if path is None or not path.exists():
        return ScanState(facts=facts)
    try:
        state = _read(path)
    except Exception as error:  # noqa: BLE001 - the readers raise whatever damage leads to
        cause = str(error).partition("\n")[0]
        reason = f"it cannot be read ({cause}). Remove it to begin anew"
        raise DataError(str(path), reason) from None
    for name, value in facts.items():
        if state.facts.get(name) != value:
            there = str(state.facts.get(name))
            difference = f"{name} is {there:.80} there and {value!s:.80} here"
            raise OtherScanError(str(folder), difference)
    return state


def _read(path: Path) -> ScanState:
    """Read a file that ``save`` has written.

    Raises:
        ValueError: if its arrays are compressed, which may hide any number of bytes, or it does not
            say how far which scan is.
        Exception: if it is damaged.
    """
    with zipfile.ZipFile(path) as archive:
        if any(each.compress_type != zipfile.ZIP_STORED for each in archive.infolist()):
            msg = "it is compressed"
            raise ValueError(msg)
    with np.load(path, allow_pickle=False) as found:
        arrays = {name: found[name] for name in found.files}
    about = parsed_json(bytes(arrays.pop(_FACTS)))
    state = ScanState(arrays=arrays, **about)
    if not (
        isinstance(state.facts, dict)
        and isinstance(state.checksums, dict)
        and type(state.num_done) is int
    ):
        msg = "it does not say how far which scan is"
        raise ValueError(msg)
    return state
