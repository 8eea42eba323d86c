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

_OPERATOR_CLASSES = (
    *("product", "attention", "convolution", "recurrent", "norm", "channel-norm", "softmax"),
    *("reduction", "indexing", "sorting", "optimizer", "random", "copy", "function", "pointwise"),
)


def share_fact(operator_class: str) -> str:
    """Name the figure that says what a class of operators reaches of a device's rates."""
    return f"{operator_class.replace('-', '_')}_share"


def call_fact(operator_class: str) -> str:
    """Name the figure that says what a call of such an operator takes whatever its size."""
    return f"{operator_class.replace('-', '_')}_call_seconds"


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
    "cache_bytes",
    "cache_bandwidth_bytes_per_second",
    *(fact(kind) for kind in _OPERATOR_CLASSES for fact in (share_fact, call_fact)),
)
_FACT_KEYS = tuple(field.name for field in fields(Fact))
_MOST_SOURCE_CHARACTERS = 2000
_MOST_SHOWN_CHARACTERS = 60


def read_fact(path: str, name: str, table: Mapping[str, Any]) -> Fact:
    """Read one figure with its source, date and certainty.

    Raises:
        DataError: if a key is unknown or missing, or a value has the wrong type.
    """
    check_keys(path, name, table, _FACT_KEYS, ())
    check_text(path, f"{name}.source", table["source"], _MOST_SOURCE_CHARACTERS)
    if isinstance(table["value"], bool) or not isinstance(table["value"], (int, float)):
        raise DataError(path, f"{name}.value is {shown(table['value'])}; it must be a number")
    if table["certainty"] not in tuple(Certainty):
        allowed = ", ".join(Certainty)
        raise DataError(
            path, f"{name}.certainty is {shown(table['certainty'])}; it must be one of {allowed}"
        )
    try:
        date.fromisoformat(table["read_on"])
    except (TypeError, ValueError):
        raise DataError(
            path, f"{name}.read_on is {shown(table['read_on'])}; write a date as '2026-01-31'"
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
            near = get_close_matches(key[:_MOST_SHOWN_CHARACTERS], known, n=1, cutoff=0.0) or known
            raise DataError(
                path, f"unknown key {shown(key)} in {place}; the nearest is {near[0]!r}"
            )
    missing = [key for key in required if key not in found]
    if missing:
        raise DataError(path, f"{place} lacks {', '.join(missing)}; add it with its source")


def check_text(path: str, place: str, found: object, most_characters: int) -> None:
    """Refuse what is no line of text that a terminal can show.

    Raises:
        DataError: if it is another type, empty, too long or has control characters.
    """
    if not isinstance(found, str) or not 0 < len(found) <= most_characters:
        needed = f"a text of at most {most_characters} characters"
        raise DataError(path, f"{place} is {shown(found)}; it must be {needed}")
    if not found.isprintable():
        raise DataError(path, f"{place} is {shown(found)}; it must be one line to be read")


def shown(value: object) -> str:
    """Write a value of a stranger's file, cut where it is long."""
    text = repr(value)
    if len(text) <= _MOST_SHOWN_CHARACTERS:
        return text
    return f"{text[:_MOST_SHOWN_CHARACTERS]}..."
