"""The file that rows are kept in: one JSON object a line, always whole.

What failed for another reason than memory is no row; it is noted beside the file, so that it is
neither lost nor tried again and again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from memfit.files import write_atomically

from .matrix import ALLOCATORS, Entry, fields_of, split_of

SOURCE = "memfit-recorded"
_PROBE_READINGS = ("context_after_init_bytes", "context_after_cublas_bytes", "context_bytes")


def row_id(card: str, entry: Entry) -> str:
    """Return the id of an entry's row on a card."""
    return f"memfit-{card_slug(card)}-{entry.name}"


def card_slug(name: str) -> str:
    """Write a card's name as part of a file name: ``NVIDIA H200`` as ``h200``."""
    words = "".join(each if each.isalnum() else " " for each in name.lower()).split()
    return "-".join(word for word in words if word not in {"nvidia", "tesla", "geforce"})


def unmeasured_row(entry: Entry, card: str, revision: str | None) -> dict[str, Any]:
    """Describe an entry as a row whose figures are still missing."""
    name = row_id(card, entry)
    return {
        "id": name,
        "source": SOURCE,
        "source_path": f"benchmarks/record_gpu.py#{entry.name}",
        "source_revision": revision,
        "licence": "MIT",
        "split": split_of(name),
        "device": card,
        **fields_of(entry),
        "measured": {},
        "notes": [],
    }


def measured_row(
    entry: Entry, row: Mapping[str, Any], probe: Mapping[str, Any], result: Mapping[str, Any]
) -> dict[str, Any]:
    """Complete a row with what the child read, and what was read of the card before."""
    extra = {
        "driver_version": probe.get("driver_version"),
        "date": date.today().isoformat(),
        "allocator_name": entry.allocator,
        "allocator_setting": ALLOCATORS[entry.allocator],
    }
    readings = probe.get("readings") or {}
    extra |= {f"probe_{name}": readings.get(name) for name in _PROBE_READINGS}
    extra |= {f"probe_{name}": value for name, value in readings.items() if "workspace" in name}
    return {
        **row,
        **result["fields"],
        "device_total_bytes": probe.get("device_total_bytes"),
        "measured": result["measured"],
        "process_source": result["process_source"],
        "measured_extra": extra | result["measured_extra"],
        "outcome": result["outcome"],
    }


class RowFile:
    """Rows that have been recorded, and failures beside them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failures = path.with_suffix(".failures.jsonl")

    def names(self) -> frozenset[str]:
        """Return the ids of the rows that are there."""
        return frozenset(row["id"] for row in _lines(self.path))

    def failed_names(self) -> frozenset[str]:
        """Return the ids of what failed."""
        return frozenset(failure["id"] for failure in _lines(self.failures))

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row; a reader sees the file with it or without it."""
        _append(self.path, row)

    def append_failure(self, name: str, reason: str) -> None:
        """Note a failure."""
        note = {"id": name, "date": date.today().isoformat(), "reason": reason}
        _append(self.failures, note)


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


def _append(path: Path, value: Mapping[str, Any]) -> None:
    before = path.read_text("utf-8") if path.exists() else ""
    if before and not before.endswith("\n"):
        before += "\n"
    write_atomically(path, before + json.dumps(value, allow_nan=False) + "\n")
