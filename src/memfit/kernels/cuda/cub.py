"""Temporary storage of cub, close to that of cub 2.x.

It comes with an interval, because the sizes of tiles change with card and version.
"""

from __future__ import annotations

from memfit.kernels.rounding import ceil_div
from memfit.units import KIB

INDEX_BYTES = 8
SLACK_BYTES = 64 * KIB
"""How far above its figure cub may go."""
RADIX_BITS = 8
_SINGLE_TILE_ITEMS = 256 * 19
_ONESWEEP_THREADS, _ONESWEEP_ITEMS = 384, 21
_SCAN_TILE = 1920
_WARP = 32


def radix_sort_bytes(num_items: int, key_bytes: int, value_bytes: int, num_bits: int) -> int:
    """Return the temporary storage of cub's radix sort of pairs.

    A second copy of keys and values to pass them back and forth, one line of 256 counters per tile
    to look back at, and the histograms. A few thousand items are sorted by one block without any.

    Source: cub/device/dispatch/dispatch_radix_sort.cuh of CCCL 2.x (onesweep, sm70 on); the sizes
    of tiles change between versions, which moves the result by less than a tenth.
    """
    widest = max(4, key_bytes, value_bytes)
    if num_items <= _SINGLE_TILE_ITEMS * 4 // widest:
        return 1
    num_passes = ceil_div(num_bits, RADIX_BITS)
    spare = num_items * (key_bytes + value_bytes) if num_passes > 1 else 0
    tile = _ONESWEEP_THREADS * max(1, _ONESWEEP_ITEMS * 4 // widest)
    digits = 1 << RADIX_BITS
    return spare + ceil_div(num_items, tile) * digits * 4 + num_passes * digits * INDEX_BYTES


def scan_bytes(num_items: int) -> int:
    """Return the temporary storage of cub's scans and selections: a status word per tile.

    Source: cub/device/dispatch/dispatch_scan.cuh of CCCL 2.x.
    """
    return 16 * (ceil_div(num_items, _SCAN_TILE) + _WARP)
