"""Opens a file that holds a memory snapshot, in whichever form tools leave them.

``torch.cuda.memory._dump_snapshot`` writes a pickle; people compress it (``.gz``), write it as
JSON, or keep the page that ``torch.cuda._memory_viz`` makes, which carries the pickle in base64.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import io
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import DataError
from memfit.units import GIB, format_bytes

from .plain_pickle import PlainPickleError, loads_plain

_NEEDED = (
    "Needed is the pickle that torch.cuda.memory._dump_snapshot writes, as it is or compressed "
    "with gzip, the same as JSON, or a page of torch.cuda._memory_viz."
)
_GZIP = b"\x1f\x8b"
_PICKLE_STARTS = b"\x80(}]"
"""PROTO of protocols 2 to 5; MARK, EMPTY_DICT and EMPTY_LIST of 0 and 1."""
_PAGE_HEAD_BYTES = 4096
_PAGE_CONTENT = re.compile(rb'"base64"\s*:\s*"([A-Za-z0-9+/=]*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """How large a snapshot may be; what is larger is refused before it takes memory or time."""

    max_file_bytes: int = GIB
    """Of the file once it is unpacked. Reading takes up to thirty times as much memory, of real
    snapshots about eight times."""
    max_entries: int = 2_000_000
    """Of one device's history; a hundred thousand take some seconds."""
    max_blocks: int = 500_000
    """In all segments."""
    max_seconds: float = 300.0
    """Of processor time, for all replays together."""


def load_content(path: Path, limits: ReadLimits) -> Mapping[str, Any]:
    """Read a file of a snapshot as plain data.

    Raises:
        DataError: if there is no such file, it is too large, or it is no snapshot.
    """
    if not path.exists():
        raise DataError(str(path), "there is no such file; give a snapshot's path, or a run folder")
    if not path.is_file():
        raise DataError(str(path), f"it is no regular file. {_NEEDED}")
    data = _read(path, limits)
    if data.startswith(_GZIP):
        data = _unpacked(path, data, limits)
    if not data:
        raise DataError(str(path), f"it is empty. {_NEEDED}")
    content = _parsed(path, data)
    if isinstance(content, list) and not all(isinstance(each, dict) for each in content):
        reason = (
            "it is a list of something else than segments, such as the memory timeline of "
            f"torch.profiler, which has sums and no blocks. {_NEEDED}"
        )
        raise DataError(str(path), reason)
    if isinstance(content, list):
        # What torch.cuda.memory_snapshot() gives; torch.cuda._memory_viz reads it so too.
        content = {"segments": content, "device_traces": []}
    if not isinstance(content, dict):
        found = type(content).__name__
        raise DataError(str(path), f"it holds a {found}; a memory snapshot is a dictionary")
    return content


def _read(path: Path, limits: ReadLimits) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limits.max_file_bytes + 1)
    except OSError as error:
        raise DataError(str(path), f"it cannot be read: {error.strerror or error}") from None
    return _within(path, data, limits)


def _within(path: Path, data: bytes, limits: ReadLimits) -> bytes:
    if len(data) > limits.max_file_bytes:
        reason = (
            f"it holds more than {format_bytes(limits.max_file_bytes)}. Record fewer events with "
            "_record_memory_history(max_entries=100000), or allow more with --max-file"
        )
        raise DataError(str(path), reason)
    return data


def _unpacked(path: Path, data: bytes, limits: ReadLimits) -> bytes:
    """Decompress up to the limit and not a byte further."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            return _within(path, file.read(limits.max_file_bytes + 1), limits)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(str(path), f"its gzip data are damaged ({error}). {_NEEDED}") from None


def _parsed(path: Path, data: bytes) -> object:
    """Tell the form by how the data begin."""
    if data[0] in _PICKLE_STARTS:
        return _unpickled(path, data)
    begin = data[:_PAGE_HEAD_BYTES].lstrip()
    if begin[:1] in {b"{", b"["}:
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            reason = f"it cannot be read as JSON ({str(error)[:200]}). {_NEEDED}"
            raise DataError(str(path), reason) from None
    if b"<html" in begin.lower():
        return _unpickled(path, _of_page(path, data))
    if begin.startswith(b"PK"):
        reason = f"it is a zip archive, as torch.save writes them, and no snapshot. {_NEEDED}"
        raise DataError(str(path), reason)
    raise DataError(str(path), f"it is neither a pickle nor JSON nor a page. {_NEEDED}")


def _of_page(path: Path, data: bytes) -> bytes:
    """Take the pickle out of a page of ``torch.cuda._memory_viz``."""
    found = _PAGE_CONTENT.search(data)
    if found is None:
        raise DataError(str(path), f"it is a page without a snapshot in it. {_NEEDED}")
    try:
        return base64.b64decode(found[1], validate=True)
    except binascii.Error as error:
        raise DataError(str(path), f"the snapshot in the page is damaged ({error})") from None


def _unpickled(path: Path, data: bytes) -> object:
    try:
        return loads_plain(data)
    except PlainPickleError as error:
        reason = (
            f"it cannot be read as a memory snapshot: {error}. Nothing of it was run. {_NEEDED}"
        )
        raise DataError(str(path), reason) from None
