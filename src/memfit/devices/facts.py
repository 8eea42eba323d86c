"""The figures that a device may have, and how one is read from a file and checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from datetime import date
from difflib import get_close_matches
from typing import Any

from memfit.errors import DataError
from memfit.figures import Certainty

from .spec import Fact

REQUIRED_FACTS = (
    "memory_bytes",
    "memory_bandwidth_bytes_per_second",
    "matrix_float32_flops_per_second",
    "link_bytes_per_second",
    "context_bytes",
    "launch_seconds",
)
OPTIONAL_FACTS = (
    "matrix_float64_flops_per_second",
    "matrix_tf32_flops_per_second",
    "matrix_float16_flops_per_second",
    "matrix_bfloat16_flops_per_second",
    "num_multiprocessors",
    "context_after_init_bytes",
    "context_after_cublas_bytes",
    "cublas_workspace_bytes",
    "cublaslt_workspace_bytes",
    "rank_link_bytes_per_second",
    "network_bytes_per_second",
)
_FACT_KEYS = tuple(field.name for field in fields(Fact))


def read_fact(path: str, name: str, table: Mapping[str, Any]) -> Fact:
    """Read one figure with its source, date and certainty.

    Raises:
        DataError: if a key is unknown or missing, or a value has the wrong type.
    """
    check_keys(path, name, table, _FACT_KEYS, ())
    if isinstance(table["value"], bool) or not isinstance(table["value"], (int, float)):
        raise DataError(path, f"{name}.value is {table['value']!r}; it must be a number")
    if table["certainty"] not in tuple(Certainty):
        allowed = ", ".join(Certainty)
        raise DataError(
            path, f"{name}.certainty is {table['certainty']!r}; it must be one of {allowed}"
        )
    try:
        date.fromisoformat(table["read_on"])
    except (TypeError, ValueError):
        raise DataError(
            path, f"{name}.read_on is {table['read_on']!r}; write a date as '2026-01-31'"
        ) from None
    return Fact(**table)


def check_keys(
    path: str,
    place: str,
    found: object,
    required: Collection[str],
    optional: Collection[str],
) -> None:
    """Refuse unknown keys, with the nearest known one, and missing keys.

    Raises:
        DataError: if there is such a key, or what was found is no table.
    """
    if not isinstance(found, dict):
        raise DataError(path, f"{place} must be a table of keys, not {type(found).__name__}")
    known = (*required, *optional)
    for key in found:
        if key not in known:
            nearest = (get_close_matches(key, known, n=1, cutoff=0.0) or known)[0]
            raise DataError(path, f"unknown key {key!r} in {place}; the nearest is {nearest!r}")
    missing = [key for key in required if key not in found]
    if missing:
        raise DataError(path, f"{place} lacks {', '.join(missing)}; add it with its source")
