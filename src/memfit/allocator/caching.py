"""PyTorch's CUDA caching allocator, followed rule by rule in pure Python.

Source: DeviceCachingAllocator of c10/cuda/CUDACachingAllocator.cpp (torch 2.11 to 2.13). Modelled:
rounding, the pools, best fit, splitting, merging, expandable segments, the way out of exhausted
memory and garbage collection. Not modelled: ``record_stream`` (a block used on a second stream is
free again at once, where PyTorch waits for that stream), private pools of CUDA graphs and MemPool
with allocators of their own, and the preemptive refusal of ``throw_on_cudamalloc_oom``.
"""

from __future__ import annotations

from collections.abc import Collection

from memfit.allocator import expandable
from memfit.allocator.blocks import (
    ALLOCATED,
    FREE,
    MIN_BLOCK_BYTES,
    MIN_LARGE_BYTES,
    SEGMENT_ROUNDING_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    UNLIMITED_BYTES,
    Block,
    Pool,
    SearchClock,
    absorb,
)
from memfit.allocator.device_memory import DeviceMemory
from memfit.allocator.settings import AllocatorSettings
from memfit.errors import MemfitError, UsageError
from memfit.units import format_bytes


class DeviceExhaustedError(MemfitError):
    """Say which request the device could not serve, and what the allocator held then."""

    def __init__(
        self,
        *,
        requested_bytes: int,
        allocated_bytes: int,
        reserved_bytes: int,
        capacity_bytes: int,
    ) -> None:
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.capacity_bytes = capacity_bytes
        super().__init__(
            f"A request of {format_bytes(requested_bytes)} does not fit into "
            f"{format_bytes(capacity_bytes)}: {format_bytes(allocated_bytes)} are allocated, "
            f"{format_bytes(reserved_bytes)} reserved. Free something, or raise the capacity."
        )


class CachingAllocator:
    """Simulates PyTorch's CUDA caching allocator of one device.

    Args:
        settings: how it is set.
        capacity_bytes: what the device gives in all; None means no end. A memory fraction counts
            from it.
        private_streams: streams whose pools keep what they have, as those of CUDA graphs and
            MemPool do while anyone uses them, until ``release`` is called.

    Raises:
        UsageError: if a memory fraction is set without a capacity.
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        capacity_bytes: int | None = None,
        private_streams: Collection[int] = (),
    ) -> None:
        self.settings = settings = settings or AllocatorSettings()
        self.allocated_bytes = 0
        self.peak_allocated_bytes = 0
        self.num_retries = 0
        """Times that all cached blocks were given back because the device had no more."""
        self.device = DeviceMemory(capacity_bytes)
        divisions = settings.divisions()
        self._divisions = divisions if max(divisions) > 1 else None
        self._max_split_bytes = settings.max_split_size_bytes or UNLIMITED_BYTES
        self._allowed_bytes = _allowed(settings, capacity_bytes)
        self._collects = self._allowed_bytes is not None and bool(
            settings.garbage_collection_threshold
        )
        self._private_streams = frozenset(private_streams)
        self._small_pools: dict[int, Pool] = {}
        self._large_pools: dict[int, Pool] = {}
        self._small_clock = SearchClock()
        self._large_clock = SearchClock()

    @property
    def reserved_bytes(self) -> int:
        """What the allocator holds of the device."""
        return self.device.reserved_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The most it held since the last reset."""
        return self.device.peak_reserved_bytes

    @property
    def num_segments(self) -> int:
        """Segments from cudaMalloc; as in PyTorch's statistics, expandable ones do not count."""
        return self.device.num_segments

    @property
    def num_device_allocations(self) -> int:
        """Calls of cudaMalloc, or mappings of expandable segments."""
        return self.device.num_allocations

    def reset_peaks(self) -> None:
        """Let the peaks begin anew, as ``torch.cuda.reset_peak_memory_stats`` does."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.device.peak_reserved_bytes = self.device.reserved_bytes

    def rounded(self, num_bytes: int) -> int:
        """Round a request up to what is looked for.

        Source: round_size and roundup_power2_next_division.
        """
        if self._divisions is not None and num_bytes >= MIN_BLOCK_BYTES:
            exponent = num_bytes.bit_length() - 1
            count = self._divisions[min(max(exponent - 20, 0), len(self._divisions) - 1)]
            if count > 1 and num_bytes > MIN_BLOCK_BYTES * count:
                division_bytes = (1 << exponent) // count
                return -(-num_bytes // division_bytes) * division_bytes
        return (num_bytes + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES

    def allocate(self, num_bytes: int, stream: int = 0) -> Block:
        """Serve a request of at least one byte.

        Raises:
            DeviceExhaustedError: if the device has no more, with every free block given back.
            ValueError: if the request is not positive.
        """
        if num_bytes <= 0:
            msg = f"{num_bytes} bytes cannot be allocated; PyTorch asks for at least 1"
            raise ValueError(msg)
        rounded_bytes = (
            (num_bytes + 511) & -512 if self._divisions is None else self.rounded(num_bytes)
        )
        is_small = rounded_bytes <= SMALL_BYTES
        pool = (self._small_pools if is_small else self._large_pools).get(stream)
        if pool is None:
            pool = self.pool(stream, is_small=is_small)
        block = self._cached(pool, rounded_bytes) or self._from_device(pool, rounded_bytes)
        remainder_bytes = block.num_bytes - rounded_bytes
        if remainder_bytes >= pool.least_remainder_bytes and rounded_bytes < pool.split_below_bytes:
            block = _split(block, rounded_bytes)
        block.state = ALLOCATED
        self.allocated_bytes += block.num_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Block) -> None:
        """Put a block back into its pool, merged with its free neighbours.

        Raises:
            ValueError: if it is not allocated.
        """
        if block.state != ALLOCATED:
            msg = f"the block at {block.address:#x} is not allocated; free each block once"
            raise ValueError(msg)
        self.allocated_bytes -= block.num_bytes
        block.state = FREE
        if block.previous is not None:
            absorb(block, block.previous)
        if block.next is not None:
            absorb(block, block.next)
        block.pool.insert(block)

    def empty_cache(self) -> None:
        """Release every free segment, and the free granules of expandable ones.

        Source: release_cached_blocks.
        """
        for pool in self.pools():
            if pool.stream not in self._private_streams:
                self._release_pool(pool)

    def release(self, stream: int) -> None:
        """Release what one stream has free, as when the last user of a private pool has gone."""
        for pool in self.pools():
            if pool.stream == stream:
                self._release_pool(pool)

    def pools(self) -> tuple[Pool, ...]:
        """Return all pools, to look at: large before small, by stream."""
        large = (pool for _, pool in sorted(self._large_pools.items()))
        return (*large, *(pool for _, pool in sorted(self._small_pools.items())))

    def pool(self, stream: int, *, is_small: bool) -> Pool:
        """Return a pool of a stream; a new one follows the rule of splitting.

        Source: should_split.
        """
        pools = self._small_pools if is_small else self._large_pools
        if stream not in pools:
            clock = self._small_clock if is_small else self._large_clock
            pools[stream] = pool = Pool(is_small=is_small, stream=stream, clock=clock)
            if not is_small and not self.settings.expandable_segments:
                pool.least_remainder_bytes = SMALL_BYTES + 1
                pool.split_below_bytes = self._max_split_bytes
        return pools[stream]

    def _cached(self, pool: Pool, rounded_bytes: int) -> Block | None:
        """Take the free block that fits best, if there is one that may be used.

        Source: get_free_block.
        """
        if self._collects:
            pool.clock.num_searches += 1
        index = pool.first_fit(rounded_bytes)
        if index == len(pool.keys):
            return None
        block = pool.blocks[index]
        if block.segment is not None:
            index = expandable.least(pool.blocks, index)
            block = pool.blocks[index]
        max_split_bytes = self._max_split_bytes
        if rounded_bytes < max_split_bytes:
            if block.num_bytes >= max_split_bytes:
                return None
        elif block.num_bytes >= rounded_bytes + self.settings.max_non_split_rounding_bytes:
            return None
        return pool.take(index)

    def _from_device(self, pool: Pool, rounded_bytes: int) -> Block:
        """Take a new segment, after giving back cached ones if need be.

        Source: malloc, from the garbage collection on.
        """
        if self._collects:
            self._collect_garbage()
        block = self._ask_device(pool, rounded_bytes)
        if block is None and self._release_oversize(pool, rounded_bytes):
            block = self._ask_device(pool, rounded_bytes)
        if block is None:
            self.empty_cache()
            self.num_retries += 1
            block = self._ask_device(pool, rounded_bytes)
        if block is None:
            limit_bytes = self._allowed_bytes
            if limit_bytes is None:
                limit_bytes = self.device.capacity_bytes or 0
            raise DeviceExhaustedError(
                requested_bytes=rounded_bytes,
                allocated_bytes=self.allocated_bytes,
                reserved_bytes=self.reserved_bytes,
                capacity_bytes=limit_bytes,
            )
        return block

    def _ask_device(self, pool: Pool, rounded_bytes: int) -> Block | None:
        """Ask the device once.

        Source: get_allocation_size and alloc_block. A memory fraction is checked against the
        segment's size, also where an expandable segment then maps whole granules.
        """
        large_segment_bytes = self.settings.large_segment_bytes
        if rounded_bytes <= SMALL_BYTES:
            segment_bytes = SMALL_SEGMENT_BYTES
        elif rounded_bytes < MIN_LARGE_BYTES:
            segment_bytes = large_segment_bytes
        else:
            segment_bytes = -(-rounded_bytes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES
        device = self.device
        allowed_bytes = self._allowed_bytes
        if allowed_bytes is not None and device.reserved_bytes + segment_bytes > allowed_bytes:
            return None
        if self.settings.expandable_segments:
            return expandable.extend(pool, rounded_bytes, device, large_segment_bytes)
        if not device.try_take(segment_bytes, "segment_alloc"):
            return None
        device.num_segments += 1
        return Block(pool, device.reserve_addresses(segment_bytes), segment_bytes, FREE, None)

    def _release_pool(self, pool: Pool) -> None:
        """Release what a pool has free; source: release_blocks."""
        for block in list(pool.blocks):
            if _is_segment(block):
                self._release_block(block)
        for block in [block for block in pool.blocks if block.segment is not None]:
            expandable.unmap(block, self.device)
            if not block.is_split():
                pool.remove_unmapped(block)  # the whole segment is empty: its addresses go too

    def _release_block(self, block: Block) -> None:
        """Give a whole free segment back to the device."""
        block.pool.remove(block)
        self.device.num_segments -= 1
        self.device.give_back(block.num_bytes, "segment_free")

    def _release_oversize(self, pool: Pool, rounded_bytes: int) -> bool:
        """Return just enough unsplittable blocks for a request; tell whether that was enough.

        Source: release_available_cached_blocks. It does nothing unless max_split_size is set. Where
        that was set in the middle of a life, a block as large may be part of a segment, and stays.
        """
        if self.settings.max_split_size_bytes is None:
            return False
        wanted_bytes = max(rounded_bytes, self._max_split_bytes)
        index = pool.first_fit(wanted_bytes)
        if index < len(pool.blocks) and _is_segment(pool.blocks[index]):
            self._release_block(pool.blocks[index])
            return True
        released_bytes = 0
        for block in reversed(pool.blocks[:index]):
            if released_bytes >= wanted_bytes or block.num_bytes < self._max_split_bytes:
                break
            if _is_segment(block):
                released_bytes += block.num_bytes
                self._release_block(block)
        return released_bytes >= wanted_bytes

    def _collect_garbage(self) -> None:
        """Release free large segments that were not used for long, above the threshold.

        Each round gives back those at least as old as the average of the remaining ones; age is
        the number of searches since a block became free. Source: garbage_collect_cached_blocks.
        """
        threshold_bytes = int(
            self.settings.garbage_collection_threshold * float(self._allowed_bytes or 0)
        )
        missing_bytes = self.reserved_bytes - threshold_bytes
        now = self._large_clock.num_searches
        blocks = [
            block
            for stream, pool in sorted(self._large_pools.items())
            for block in pool.blocks
            if not block.is_split() and stream not in self._private_streams
        ]
        has_freed = True
        while missing_bytes > 0 and has_freed and blocks:
            average = sum(now - block.age_base for block in blocks) / len(blocks)
            old = [
                block
                for block in blocks
                if block.segment is None and now - block.age_base >= average
            ]
            has_freed = bool(old)
            for block in old:
                missing_bytes -= block.num_bytes
                self._release_block(block)
                blocks.remove(block)


def _allowed(settings: AllocatorSettings, capacity_bytes: int | None) -> int | None:
    """Return the bytes that a memory fraction below 1 allows; None if there is none."""
    fraction = settings.per_process_memory_fraction
    if fraction is None or fraction >= 1.0:
        return None
    if capacity_bytes is None:
        raise UsageError(
            f"The memory fraction {fraction} has nothing to be a fraction of: no capacity is "
            "given. Pass capacity_bytes, or leave per_process_memory_fraction out."
        )
    return int(fraction * float(capacity_bytes))


def _is_segment(block: Block) -> bool:
    """Tell whether a block is all of a segment from cudaMalloc."""
    return block.segment is None and not block.is_split()


def _split(block: Block, rounded_bytes: int) -> Block:
    """Cut the beginning off a free block that is in no pool; the rest goes into the pool."""
    pool = block.pool
    front = Block(pool, block.address, rounded_bytes, FREE, block.segment)
    front.link_between(block.previous, block)
    block.address += rounded_bytes
    block.num_bytes -= rounded_bytes
    pool.insert(block)
    return front
