"""A memory snapshot as data: what one device's allocator did, and what it held in the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memfit.allocator.settings import AllocatorSettings

Frame = Mapping[str, Any]
"""``filename``, ``line`` and ``name``, as torch writes them."""
OwnerId = tuple[int, int]
"""Of a private pool, as CUDA graphs and MemPool make them; (0, 0) is the common one."""

COMMON: OwnerId = (0, 0)


@dataclass(frozen=True, slots=True)
class PoolKey:
    """Whose memory a block is: blocks go back to their own stream and their own pool alone."""

    stream: int
    owner: OwnerId

    @property
    def is_private(self) -> bool:
        """Return whether a CUDA graph or a MemPool owns it."""
        return self.owner != COMMON


@dataclass(slots=True)
class Entry:
    """One entry of a history."""

    action: str
    address: int
    """Of an ``oom``: what the device still had."""
    num_bytes: int
    """As requested, for allocations and frees; as asked of the device, for segments."""
    pool: PoolKey
    frames: Sequence[Frame]
    category: str
    """Known where torch's profiler has written the snapshot, else empty."""
    number: int
    """Its place among all entries of the file, also those that say nothing of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRecord:
    """One block of a segment in the end."""

    address: int
    num_bytes: int
    requested_bytes: int
    in_use: bool
    """Allocated, or waiting for a second stream to be done with it."""
    frames: Sequence[Frame]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRecord:
    """One segment, or one mapped stretch of an expandable one, in the end."""

    address: int
    num_bytes: int
    pool: PoolKey
    is_small: bool
    is_expandable: bool
    blocks: Sequence[BlockRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecord:
    """All that a snapshot says of one device."""

    source: str
    device: int
    num_devices: int
    """With a history or with segments."""
    settings: AllocatorSettings
    settings_text: str
    """As PYTORCH_ALLOC_CONF would say it; empty for the defaults."""
    entries: Sequence[Entry]
    """Those that say something of memory."""
    num_entries: int
    """In the file, of every kind."""
    segments: Sequence[SegmentRecord]
    is_of_profiler: bool
    """Written by torch's profiler: addresses and sizes of tensors, without an allocator."""
    notes: tuple[str, ...] = field(default=())
    """What was passed over, as sentences."""
