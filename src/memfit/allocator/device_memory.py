"""The device as the allocator sees it: addresses, capacity and a count of what was taken."""

from __future__ import annotations

from memfit.allocator.blocks import SEGMENT_ROUNDING_BYTES
from memfit.units import MIB, TIB

ADDRESS_SPACE_BYTES = 16 * TIB
"""Addresses of one expandable segment. PyTorch reserves 9/8 of the card's memory; with more than
can ever be used, no choice depends on how much that was."""
STRETCH_BYTES = 32 * MIB
"""The driver takes addresses in stretches of a multiple of this; see ``DeviceMemory``."""
_TOP_ADDRESS = 1 << 62
"""Above all addresses; only their order counts."""


class DeviceMemory:
    """Gives out device memory until its capacity is reached.

    Addresses are the driver's as far as their order goes, which decides between two equally large
    free blocks: the caching allocator takes the lower one. A request of at least 32 MiB gets a
    stretch of its own right below the last one, rounded up to 32 MiB; smaller ones fill what
    stretches have left, upwards. So a later segment lies below an earlier one. Source: addresses
    of device pointers are those of the process (CUDA C++ Programming Guide, Unified Virtual
    Address Space), which Linux gives out from the top down (mm/mmap.c,
    arch_get_unmapped_area_topdown); the stretches are read off memory snapshots of an RTX 3090
    that a public analysis of Stable Diffusion's memory prints: 20 MiB, 512 MiB and 1 GiB, asked for
    in this order, lie each right below the one before, and a segment of 2 MiB 4 MiB behind the
    first, in its stretch. The addresses are in tests/allocator/test_device_memory.py.

    Addresses are never given twice. The real driver may reuse those of freed segments. The memory
    behind freed addresses is given again at once: physical fragmentation, the driver's own tables
    and other processes are not modelled.
    """

    __slots__ = (
        "_lowest_address", "_stretches", "capacity_bytes", "highest_reserved_bytes", "log",
        "num_allocations", "num_segments", "peak_reserved_bytes", "reserved_bytes",
    )  # fmt: skip

    def __init__(self, capacity_bytes: int | None) -> None:
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        """The highest since the last reset."""
        self.highest_reserved_bytes = 0
        """The highest ever."""
        self.num_segments = 0
        self.num_allocations = 0
        self.log: list[tuple[str, int]] = []
        """Each call to the device: its action, named as in a memory snapshot, and its bytes."""
        self._lowest_address = _TOP_ADDRESS
        self._stretches: list[tuple[int, int]] = []
        """What is left of the stretches: the first address and the end of each, oldest first."""

    def reserve_addresses(self, num_bytes: int) -> int:
        """Return the first of so many addresses, without memory behind them."""
        num_bytes = -(-num_bytes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES
        if num_bytes < STRETCH_BYTES:
            for position, (first, end) in enumerate(self._stretches):
                if end - first > num_bytes:
                    self._stretches[position] = (first + num_bytes, end)
                    return first
                if end - first == num_bytes:
                    del self._stretches[position]
                    return first
        end = self._lowest_address
        self._lowest_address = first = end - -(-num_bytes // STRETCH_BYTES) * STRETCH_BYTES
        if first + num_bytes < end:
            self._stretches.append((first + num_bytes, end))
        return first

    def keep_addresses(self, begin: int) -> None:
        """Give out no address at or above one from now on: a segment lies there already."""
        self._lowest_address = min(self._lowest_address, begin // STRETCH_BYTES * STRETCH_BYTES)

    def try_take(self, num_bytes: int, action: str) -> bool:
        """Take memory, as cudaMalloc or cuMemCreate; tell whether the device had it."""
        reserved_bytes = self.reserved_bytes + num_bytes
        if self.capacity_bytes is not None and reserved_bytes > self.capacity_bytes:
            return False
        self.reserved_bytes = reserved_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved_bytes)
        self.highest_reserved_bytes = max(self.highest_reserved_bytes, reserved_bytes)
        self.num_allocations += 1
        self.log.append((action, num_bytes))
        return True

    def give_back(self, num_bytes: int, action: str) -> None:
        """Return memory, as cudaFree or cuMemUnmap."""
        self.reserved_bytes -= num_bytes
        self.log.append((action, num_bytes))
