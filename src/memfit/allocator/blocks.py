"""Blocks of device memory and the pools of free ones; what std::set<Block*> is in the allocator.

The one choice here: a pool is two parallel sorted lists, integer keys and blocks. A key is
``size << 64 | address``, so one bisection finds the smallest block that fits, lowest address first,
as BlockComparatorSize orders them (c10/cuda/CUDACachingAllocator.cpp).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from enum import IntEnum
from operator import attrgetter

from memfit.units import MIB

MIN_BLOCK_BYTES = 512
"""kMinBlockSize: every request is rounded up to a multiple of this."""
SMALL_BYTES = MIB
"""kSmallSize: the largest request of the small pool."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""kSmallBuffer: the segment of the small pool."""
SEGMENT_ROUNDING_BYTES = 2 * MIB
"""kRoundLarge: large segments are multiples of this."""
MIN_LARGE_BYTES = 10 * MIB
"""kMinLargeAlloc: from here on a request gets a segment of its own size."""
UNLIMITED_BYTES = 1 << 63
"""Above every size that occurs."""

_ADDRESS_BITS = 64
_by_address = attrgetter("address")


class BlockState(IntEnum):
    """Name what a range of addresses is used for."""

    FREE = 0
    ALLOCATED = 1
    UNMAPPED = 2
    """Addresses of an expandable segment without memory behind them."""


# Plain integers: a comparison with a member of an enumeration costs three times as much.
FREE = int(BlockState.FREE)
ALLOCATED = int(BlockState.ALLOCATED)
UNMAPPED = int(BlockState.UNMAPPED)


class ExpandableSegment:
    """One range of addresses that grows by mapping memory into it, in granules."""

    __slots__ = ("address", "granule_bytes", "num_bytes")

    def __init__(self, address: int, num_bytes: int, granule_bytes: int) -> None:
        self.address = address
        self.num_bytes = num_bytes
        self.granule_bytes = granule_bytes


class Block:
    """A range of device addresses: what ``allocate`` returns and ``free`` takes. Only read it."""

    __slots__ = (
        "address", "age_base", "next", "num_bytes", "pool", "previous", "segment", "state",
    )  # fmt: skip

    def __init__(
        self,
        pool: Pool,
        address: int,
        num_bytes: int,
        state: int,
        segment: ExpandableSegment | None,
    ) -> None:
        self.pool = pool
        self.address = address
        self.num_bytes = num_bytes
        """What the allocator counts; at least the rounded request."""
        self.state = state
        self.segment = segment
        """The expandable segment it lies in; None if cudaMalloc gave its memory."""
        self.previous: Block | None = None
        self.next: Block | None = None
        self.age_base = 0

    def is_split(self) -> bool:
        """Return whether other blocks share its segment."""
        return self.previous is not None or self.next is not None

    def link_between(self, before: Block | None, after: Block | None) -> None:
        """Take the place between two neighbours, either of which may be missing."""
        self.previous = before
        self.next = after
        if before is not None:
            before.next = self
        if after is not None:
            after.previous = self


class SearchClock:
    """Counts the searches of all large or all small pools: the age of a free block is measured so.

    Searches are counted only where garbage collection is on (get_free_blocks_call_count).
    """

    __slots__ = ("num_searches",)

    def __init__(self) -> None:
        self.num_searches = 0


class Pool:
    """The free and the unmapped blocks of one stream, small or large."""

    __slots__ = (
        "blocks", "clock", "is_small", "keys", "least_remainder_bytes", "split_below_bytes",
        "stream", "unmapped",
    )  # fmt: skip

    def __init__(self, *, is_small: bool, stream: int, clock: SearchClock) -> None:
        self.is_small = is_small
        self.stream = stream
        self.clock = clock
        self.keys: list[int] = []
        self.blocks: list[Block] = []
        self.unmapped: list[Block] = []
        """In the order of their addresses."""
        self.least_remainder_bytes = MIN_BLOCK_BYTES
        """A block is split only if this much would remain."""
        self.split_below_bytes = UNLIMITED_BYTES
        """Only requests below this size split a block."""

    def first_fit(self, num_bytes: int) -> int:
        """Get the index of the smallest free block that is large enough; the length if none is."""
        return bisect_left(self.keys, num_bytes << _ADDRESS_BITS)

    def take(self, index: int) -> Block:
        """Remove and return the free block at an index."""
        del self.keys[index]
        return self.blocks.pop(index)

    def insert(self, block: Block) -> None:
        """Put a block among the free ones; its age begins now."""
        block.age_base = self.clock.num_searches
        key = block.num_bytes << _ADDRESS_BITS | block.address
        keys = self.keys
        index = bisect_left(keys, key)
        keys.insert(index, key)
        self.blocks.insert(index, block)

    def remove(self, block: Block) -> None:
        """Remove a block from the free ones."""
        index = bisect_left(self.keys, block.num_bytes << _ADDRESS_BITS | block.address)
        del self.keys[index]
        del self.blocks[index]

    def insert_unmapped(self, block: Block) -> None:
        """Put a block among the unmapped ones."""
        insort(self.unmapped, block, key=_by_address)

    def remove_unmapped(self, block: Block) -> None:
        """Remove a block from the unmapped ones."""
        del self.unmapped[bisect_left(self.unmapped, block.address, key=_by_address)]


def absorb(block: Block, neighbour: Block | None) -> None:
    """Merge a neighbour in the same state into a block that is in no pool; else do nothing.

    Source: try_merge_blocks.
    """
    if neighbour is None or neighbour.state != block.state:
        return
    if neighbour.state == UNMAPPED:
        block.pool.remove_unmapped(neighbour)
    else:
        block.pool.remove(neighbour)
    if block.previous is neighbour:
        block.address = neighbour.address
        block.link_between(neighbour.previous, block.next)
    else:
        block.link_between(block.previous, neighbour.next)
    block.num_bytes += neighbour.num_bytes
