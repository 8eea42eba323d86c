"""Rounding of counts, as kernels do it to share their work out."""

from __future__ import annotations


def ceil_div(count: int, step: int) -> int:
    """Divide and round up."""
    return -(-count // step)


def round_up(count: int, multiple: int) -> int:
    """Round up to a multiple."""
    return ceil_div(count, multiple) * multiple


def last_power_of_two(count: int) -> int:
    """Return the largest power of two up to a count; 1 for nothing."""
    return 1 << (count.bit_length() - 1) if count > 0 else 1
