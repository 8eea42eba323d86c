"""An allocator that begins in the middle goes on as one that was there from the beginning."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from memfit.allocator.blocks import ALLOCATED, UNMAPPED, Block
from memfit.allocator.caching import CachingAllocator, DeviceExhaustedError
from memfit.allocator.seeding import Piece, Run, seed
from memfit.allocator.settings import AllocatorSettings
from memfit.units import GIB, MIB


def runs_of(allocator: CachingAllocator, blocks: list[Block]) -> Iterator[Run]:
    """Write down the segments of an allocator, by walking along its blocks."""
    heads: dict[int, Block] = {}
    for block in [*blocks, *(block for pool in allocator.pools() for block in pool.blocks)]:
        head = block
        while head.previous is not None:
            head = head.previous
        heads[head.address] = head
    for head in heads.values():
        stretches: list[list[Piece]] = [[]]
        block: Block | None = head
        while block is not None:
            if block.state == UNMAPPED:
                stretches.append([])
            else:
                is_used = block.state == ALLOCATED
                stretches[-1].append(
                    Piece(address=block.address, num_bytes=block.num_bytes, in_use=is_used)
                )
            block = block.next
        for pieces in filter(None, stretches):
            yield Run(
                stream=head.pool.stream,
                is_small=head.pool.is_small,
                is_expandable=head.segment is not None,
                pieces=pieces,
            )


def step(allocator: CachingAllocator, alive: list[Block], draw: random.Random) -> None:
    """Free something, empty the cache, or ask for something; a refusal is part of the program."""
    choice = draw.random()
    if alive and choice < 0.45:
        allocator.free(alive.pop(draw.randrange(len(alive))))
    elif choice < 0.48:
        allocator.empty_cache()
    else:
        num_bytes, stream = int(2 ** draw.uniform(5, 27)), draw.choice([0, 0, 5])
        try:
            alive.append(allocator.allocate(num_bytes, stream))
        except DeviceExhaustedError:
            return


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("number", range(10))
def test_a_seeded_allocator_goes_on_as_the_first_one_does(expandable, number) -> None:
    settings = AllocatorSettings(expandable_segments=expandable)
    first = CachingAllocator(settings, GIB)
    first_alive: list[Block] = []
    draw = random.Random(number)
    for _ in range(200):
        step(first, first_alive, draw)

    second = CachingAllocator(settings, GIB)
    bases = {
        (block.pool.stream, block.pool.is_small): block.segment.address
        for pool in first.pools()
        for block in pool.unmapped
        if block.segment is not None
    }
    in_use = seed(second, list(runs_of(first, first_alive)), bases)
    second_alive = [in_use[block.address] for block in first_alive]
    first.device.log.clear()
    states = draw.getstate()
    for _ in range(200):
        step(first, first_alive, draw)
    draw.setstate(states)
    for _ in range(200):
        step(second, second_alive, draw)

    assert second.device.log == first.device.log
    assert second.allocated_bytes == first.allocated_bytes
    assert second.reserved_bytes == first.reserved_bytes
    assert second.num_segments == first.num_segments


def test_private_pools_keep_what_they_have_until_they_are_released() -> None:
    allocator = CachingAllocator(capacity_bytes=100 * MIB, private_streams=[1])
    allocator.free(allocator.allocate(60 * MIB, 1))
    allocator.free(allocator.allocate(30 * MIB, 0))

    allocator.empty_cache()
    assert allocator.reserved_bytes == 60 * MIB
    with pytest.raises(DeviceExhaustedError):
        allocator.allocate(50 * MIB, 0)
    allocator.release(1)
    assert allocator.reserved_bytes == 0
    assert allocator.allocate(50 * MIB, 0).num_bytes == 50 * MIB
