"""The table as it was computed once: figures with their date and versions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import DataError
from memfit.files import write_atomically
from memfit.journal.plain_text import parsed_json

from .figures import RowFigures

PATH = Path(__file__).parent / "datasets" / "table.json"
"""Written by benchmarks/bench_trident_table.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """When and with what the figures were computed."""

    date: str
    memfit: str
    torch: str
    num_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows, as far as they are known, with their origin."""

    origin: Origin
    rows: Sequence[RowFigures]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        origin = self.origin
        return {
            "date": origin.date,
            "memfit": origin.memfit,
            "torch": origin.torch,
            "num_threads": origin.num_threads,
            "rows": [row.to_json() for row in self.rows],
        }

    def save(self, path: Path = PATH) -> None:
        """Write the table."""
        write_atomically(path, json.dumps(self.to_json(), indent=1) + "\n")


def recorded_table(path: Path = PATH) -> Table:
    """Read the table that comes with memfit.

    Raises:
        DataError: if it is not there, or is something else.
    """
    try:
        content = parsed_json(path.read_text("utf-8"))
        origin = Origin(**{name: content[name] for name in Origin.__dataclass_fields__})
        return Table(origin=origin, rows=[RowFigures.from_json(row) for row in content["rows"]])
    except OSError as error:
        reason = f"it cannot be read ({error.strerror}); --table live computes the table here."
        raise DataError(str(path), reason) from None
    except (ValueError, KeyError, TypeError) as error:
        reason = f"it is no table of figures ({error}); --table live computes the table here."
        raise DataError(str(path), reason) from None
