"""``--table``: what the document says of its five variants, beside what they take."""

from __future__ import annotations

from .show import table

__all__ = ["table"]
