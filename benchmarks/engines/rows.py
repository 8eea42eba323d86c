"""What a rank has seen of an engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """What one rank has seen of an engine; differences and bytes are None where it was refused."""

    engine: str
    ranks: int
    rank: int
    plan: Sequence[str]
    dtype: str
    weight_difference: float | None = None
    """The largest, of any weight, against whole batches after five uneven steps."""
    loss_difference: float | None = None
    """The largest relative one, of any step."""
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    low_bytes: int | None = None
    high_bytes: int | None = None
    """The predicted interval; on gloo its end is a rank whose thread of gloo's comes late."""
    free_peak_bytes: int | None = None
    """As measured where nothing waits for such threads."""
    error_fraction: float | None = None
    refused: str | None = None


def show(rows: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    """Print rows as one JSON object, or a line each."""
    if as_json:
        print(json.dumps({"rows": rows}, indent=1))
        return
    for row in rows:
        print(f"{row['engine']:28} rank {row['rank']} of {row['ranks']}: {_line(row)}")


def _line(row: dict[str, Any]) -> str:
    if row["refused"]:
        return row["refused"]
    return (
        f"weights {row['weight_difference']:.1e}, losses {row['loss_difference']:.1e}, predicted "
        f"{row['predicted_peak_bytes']:,}, measured {row['measured_peak_bytes']:,} "
        f"({row['error_fraction']:+.2%}), free {row['free_peak_bytes']:,}"
    )
