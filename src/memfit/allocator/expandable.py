"""Expandable segments: growing one by mapping memory into it, and unmapping what is free again.

Source: find_expandable_block, map_block, try_allocate_expandable_block, unmap_block of
c10/cuda/CUDACachingAllocator.cpp, torch 2.11 to 2.13.
"""

from __future__ import annotations

from memfit.allocator.blocks import (
    ALLOCATED,
    FREE,
    SMALL_SEGMENT_BYTES,
    UNMAPPED,
    Block,
    ExpandableSegment,
    Pool,
    absorb,
)
from memfit.allocator.device_memory import ADDRESS_SPACE_BYTES, DeviceMemory


def extend(
    pool: Pool, num_bytes: int, device: DeviceMemory, large_segment_bytes: int
) -> Block | None:
    """Map memory until a free block is large enough, and take it; None if the device has no more.

    What was mapped before the device ran out stays mapped and free.
    """
    block = _place(pool, num_bytes, device, large_segment_bytes)
    if block.state == UNMAPPED and not _map(block, min(block.num_bytes, num_bytes), device):
        return None
    while block.num_bytes < num_bytes:
        following = block.next
        assert following is not None, "an expandable segment never runs out of addresses"
        missing_bytes = num_bytes - block.num_bytes
        if not _map(following, min(missing_bytes, following.num_bytes), device):
            return None
        block = following  # it has taken in the block before it
    pool.remove(block)
    return block


def unmap(block: Block, device: DeviceMemory) -> None:
    """Release the whole granules of a free block; its ends stay mapped and free."""
    segment = block.segment
    assert segment is not None, "only blocks of expandable segments are unmapped"
    granule = segment.granule_bytes
    end = block.address + block.num_bytes
    first = segment.address - (segment.address - block.address) // granule * granule
    last = segment.address + (end - segment.address) // granule * granule
    if first >= last:
        return
    pool = block.pool
    pool.remove(block)
    if first > block.address:
        before = Block(pool, block.address, first - block.address, FREE, segment)
        before.link_between(block.previous, block)
        pool.insert(before)
    if end > last:
        after = Block(pool, last, end - last, FREE, segment)
        after.link_between(block, block.next)
        pool.insert(after)
    block.address = first
    block.num_bytes = last - first
    block.state = UNMAPPED
    absorb(block, block.previous)
    absorb(block, block.next)
    pool.insert_unmapped(block)
    device.give_back(last - first, "segment_unmap")


def _place(pool: Pool, num_bytes: int, device: DeviceMemory, large_segment_bytes: int) -> Block:
    """Find the lowest addresses, unmapped or free, that can hold a request; else a new segment."""
    for unmapped in pool.unmapped:
        before = unmapped.previous
        block = before if before is not None and before.state != ALLOCATED else unmapped
        room_bytes = 0
        following: Block | None = block
        while room_bytes < num_bytes and following is not None and following.state != ALLOCATED:
            room_bytes += following.num_bytes
            following = following.next
        if room_bytes >= num_bytes:
            return block
    granule = SMALL_SEGMENT_BYTES if pool.is_small else large_segment_bytes
    space_bytes = -(-ADDRESS_SPACE_BYTES // granule) * granule
    segment = ExpandableSegment(device.reserve_addresses(space_bytes), space_bytes, granule)
    block = Block(pool, segment.address, space_bytes, UNMAPPED, segment)
    pool.insert_unmapped(block)
    return block


def _map(block: Block, num_bytes: int, device: DeviceMemory) -> bool:
    """Map the beginning of an unmapped block and merge it with free neighbours."""
    segment = block.segment
    assert segment is not None, "only blocks of expandable segments are mapped"
    mapped_bytes = -(-num_bytes // segment.granule_bytes) * segment.granule_bytes
    if not device.try_take(mapped_bytes, "segment_map"):
        return False
    pool = block.pool
    pool.remove_unmapped(block)
    block.state = FREE
    if mapped_bytes < block.num_bytes:
        address = block.address + mapped_bytes
        rest = Block(pool, address, block.num_bytes - mapped_bytes, UNMAPPED, segment)
        rest.link_between(block, block.next)
        pool.insert_unmapped(rest)
        block.num_bytes = mapped_bytes
    absorb(block, block.previous)
    absorb(block, block.next)
    pool.insert(block)
    return True


def least(blocks: list[Block], index: int) -> int:
    """Move on from a block that can grow to one that cannot grow as far, as get_free_block does."""
    reach_bytes = _expandable_bytes(blocks[index])
    while index + 1 < len(blocks):
        following_bytes = _expandable_bytes(blocks[index + 1])
        if following_bytes >= reach_bytes:
            break
        index += 1
        reach_bytes = following_bytes
    return index


def _expandable_bytes(block: Block) -> int:
    """Return what a block has, together with unmapped addresses right behind it."""
    following = block.next
    if following is not None and following.state == UNMAPPED:
        return block.num_bytes + following.num_bytes
    return block.num_bytes
