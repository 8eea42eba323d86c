"""Reads and writes sizes, durations and fractions: the only place that spells GiB."""

from __future__ import annotations

import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

_SIZE = re.compile(r"^\s*(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>[A-Za-z]*)\s*$")
_BYTES_PER_UNIT = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "k": KIB,
    "m": MIB,
    "g": GIB,
    "t": TIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_UNITS = {"GiB": (GIB, 2), "MiB": (MIB, 1), "KiB": (KIB, 1), "B": (1, 0)}
"""The units of ``format_bytes``, each with its bytes and its digits behind the point."""


def parse_bytes(text: str | int) -> int:
    """Read a size such as ``39GiB``, ``8GB`` or ``1048576`` as bytes.

    Binary suffixes (KiB, MiB, GiB, TiB) are powers of 1024, and so is the letter alone (K, M, G,
    T), as Docker and Slurm have it; decimal ones (kB, MB, GB, TB) are powers of 1000. A bare number
    is bytes, from a MiB on: ``12`` is more likely to mean 12 GiB.

    Raises:
        ValueError: if the text is no size, or lacks its unit.
    """
    if isinstance(text, int):
        return text
    match = _SIZE.match(text)
    unit = match["unit"].lower() if match else None
    if match is None or unit not in _BYTES_PER_UNIT:
        msg = f"{text!r} is not a size; write it as 39GiB, 8GB, 512MiB or a number of bytes"
        raise ValueError(msg)
    num_bytes = int(float(match["number"]) * _BYTES_PER_UNIT[unit])
    if not unit and 0 < num_bytes < MIB:
        number = match["number"]
        msg = (
            f"{text!r} has no unit, and {number} bytes are hardly meant; write it as {number}GiB, "
            f"{number}MiB or {number}B"
        )
        raise ValueError(msg)
    return num_bytes


def format_bytes(num_bytes: int | float) -> str:
    """Write bytes the way people read them, in 1024-based units: ``1.50 GiB``, ``812.3 MiB``."""
    if abs(num_bytes) >= GIB:
        return f"{num_bytes / GIB:,.2f} GiB"
    if abs(num_bytes) >= MIB:
        return f"{num_bytes / MIB:,.1f} MiB"
    if abs(num_bytes) >= KIB:
        return f"{num_bytes / KIB:,.1f} KiB"
    return f"{num_bytes:.0f} B"


def in_unit_of(num_bytes: int, other_bytes: int) -> str:
    """Write bytes as a bare number, in the unit that other bytes are shown in beside them."""
    unit_bytes, digits = _UNITS[format_bytes(other_bytes).partition(" ")[2]]
    return f"{num_bytes / unit_bytes:,.{digits}f}"


def format_seconds(seconds: float) -> str:
    """Write a duration with three significant digits: ``12.3 ms``, ``4.56 s``, ``3 min 20 s``."""
    # Each bound is where three digits round up to the next unit: no "1e+03 ms", no "60 s".
    if seconds >= 59.95:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    if seconds >= 0.9995:
        return f"{seconds:.3g} s"
    if seconds >= 0.9995e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us"


def format_fraction(fraction: float) -> str:
    """Write a fraction as a percentage with its sign: ``+0.12 %``."""
    return f"{fraction * 100:+.2f} %"
