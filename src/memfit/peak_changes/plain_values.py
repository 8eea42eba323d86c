"""Checks the values of a file that anybody may have written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_MOST = 2**60
"""An exbibyte; what is larger is no memory."""


def text(value: Any) -> str:
    """Return a text without what would steer a terminal.

    Raises:
        TypeError: if it is none.
    """
    if not isinstance(value, str):
        msg = f"{_shown(value)} stands where a text is needed"
        raise TypeError(msg)
    return "".join(each for each in value if each.isprintable())


def natural(name: str, value: Any) -> int:
    """Return a whole number that is not negative.

    Raises:
        ValueError: if it is none, or larger than any memory.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST:
        msg = f"{name} is {_shown(value)}, not a whole number from 0 on"
        raise ValueError(msg)
    return value


def seconds(name: str, value: Any) -> float:
    """Return a duration.

    Raises:
        ValueError: if it is none.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        msg = f"{name} is {_shown(value)}, not a number from 0 on"
        raise ValueError(msg)
    return float(value)


def parts(name: str, value: Any) -> dict[str, int]:
    """Return bytes by name.

    Raises:
        TypeError: if it is no JSON object.
        ValueError: if a part is no number of bytes.
    """
    if not isinstance(value, Mapping):
        msg = f"{name} is {_shown(value)}, not a JSON object"
        raise TypeError(msg)
    return {text(part): natural(f"{name} of {text(part)!r}", each) for part, each in value.items()}


def _shown(value: Any) -> str:
    """Write a value in brief."""
    if isinstance(value, str | int | float | bool) or value is None:
        return repr(value)[:40]
    return f"a {type(value).__name__}"
