"""How often Python looks for objects that hold each other alone, where many are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG_OBJECTS = 200_000
"""Recording makes so many objects that looking for cycles among them at Python's usual pace takes a
sixth of the time, and importing libraries nearly as much."""


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Have Python look for reference cycles less often for a while."""
    usual = gc.get_threshold()
    gc.set_threshold(max(_YOUNG_OBJECTS, usual[0]) if usual[0] else 0, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
