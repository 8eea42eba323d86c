"""The device as the allocator sees it: addresses, capacity and a count of what was taken."""

from __future__ import annotations

from memfit.allocator.blocks import SEGMENT_ROUNDING_BYTES
from memfit.units import TIB

ADDRESS_SPACE_BYTES = 16 * TIB
"""Addresses of one expandable segment. PyTorch reserves 9/8 of the card's memory; with more than
can ever be used, no choice depends on how much that was."""


class DeviceMemory:
    """Gives out device memory until its capacity is reached.

    Addresses only grow, aligned to 2 MiB, and are never given twice. The real driver may reuse the
    addresses of freed segments; that changes nothing but which of two equally large blocks in
    different segments is taken first. The memory behind freed addresses is given again at once:
    physical fragmentation, the driver's own tables and other processes are not modelled.
    """

    __slots__ = (
        "_next_address", "capacity_bytes", "highest_reserved_bytes", "log", "num_allocations",
        "num_segments", "peak_reserved_bytes", "reserved_bytes",
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
        self._next_address = SEGMENT_ROUNDING_BYTES

    def reserve_addresses(self, num_bytes: int) -> int:
        """Return the first of so many addresses, without memory behind them."""
        address = self._next_address
        self._next_address += -(-num_bytes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES
        return address

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
