"""Puts an allocator into a state in the middle of its life: segments, and what lies in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from memfit.allocator.blocks import (
    ALLOCATED,
    FREE,
    SMALL_SEGMENT_BYTES,
    UNMAPPED,
    Block,
    ExpandableSegment,
    Pool,
)
from memfit.allocator.caching import CachingAllocator
from memfit.allocator.device_memory import ADDRESS_SPACE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of a segment: a block in use, or a free one."""

    address: int
    num_bytes: int
    in_use: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A segment from cudaMalloc, or a mapped stretch of an expandable one, from end to end."""

    stream: int
    is_small: bool
    is_expandable: bool
    pieces: Sequence[Piece]

    @property
    def address(self) -> int:
        """Return where it begins."""
        return self.pieces[0].address

    @property
    def num_bytes(self) -> int:
        """Return how long it is."""
        return sum(piece.num_bytes for piece in self.pieces)


def seed(
    allocator: CachingAllocator,
    runs: Iterable[Run],
    bases: Mapping[tuple[int, bool], int] | None = None,
) -> dict[int, Block]:
    """Give a fresh allocator these segments, and return the blocks in use by their addresses.

    The capacity is not asked: what is there was given. Mapped stretches of one pool are taken as
    parts of one expandable segment, in which new memory is mapped as well.

    Args:
        allocator: one that has served nothing yet.
        runs: the segments.
        bases: where expandable segments begin, by stream and whether they are small; where none is
            given, at the first mapped address.
    """
    in_use: dict[int, Block] = {}
    stretches: dict[tuple[int, bool], list[Run]] = {}
    for run in sorted(runs, key=lambda each: each.address):
        if run.is_expandable:
            stretches.setdefault((run.stream, run.is_small), []).append(run)
        else:
            blocks = _blocks(allocator, run, None)
            _chain(blocks)
            allocator.device.num_segments += 1
            _count(allocator, run, blocks, in_use)
    for key, group in stretches.items():
        begin = min((bases or {}).get(key, group[0].address), group[0].address)
        _seed_expandable(allocator, group, begin, in_use)
    allocator.peak_allocated_bytes = allocator.allocated_bytes
    allocator.device.highest_reserved_bytes = allocator.reserved_bytes
    allocator.reset_peaks()
    return in_use


def _seed_expandable(
    allocator: CachingAllocator, runs: Sequence[Run], begin: int, in_use: dict[int, Block]
) -> None:
    """Make one segment of mapped stretches, with unmapped addresses between and behind them."""
    first = runs[0]
    pool = allocator.pool(first.stream, is_small=first.is_small)
    granule = SMALL_SEGMENT_BYTES if first.is_small else allocator.settings.large_segment_bytes
    last = runs[-1].pieces[-1]
    space_bytes = max(ADDRESS_SPACE_BYTES, 2 * (last.address + last.num_bytes - begin))
    segment = ExpandableSegment(begin, -(-space_bytes // granule) * granule, granule)
    chain: list[Block] = []
    position = begin
    for run in runs:
        _add_unmapped(pool, segment, position, run.address, chain)
        blocks = _blocks(allocator, run, segment)
        chain += blocks
        _count(allocator, run, blocks, in_use)
        position = run.address + run.num_bytes
    _add_unmapped(pool, segment, position, begin + segment.num_bytes, chain)
    _chain(chain)
    allocator.device.keep_addresses(begin)


def _add_unmapped(
    pool: Pool, segment: ExpandableSegment, begin: int, end: int, chain: list[Block]
) -> None:
    if end > begin:
        block = Block(pool, begin, end - begin, UNMAPPED, segment)
        pool.insert_unmapped(block)
        chain.append(block)


def _blocks(
    allocator: CachingAllocator, run: Run, segment: ExpandableSegment | None
) -> list[Block]:
    pool = allocator.pool(run.stream, is_small=run.is_small)
    return [
        Block(pool, piece.address, piece.num_bytes, ALLOCATED if piece.in_use else FREE, segment)
        for piece in run.pieces
    ]


def _chain(blocks: Sequence[Block]) -> None:
    before: Block | None = None
    for block in blocks:
        block.link_between(before, None)
        before = block


def _count(
    allocator: CachingAllocator, run: Run, blocks: Sequence[Block], in_use: dict[int, Block]
) -> None:
    """Count what a run holds, and put its free blocks into their pool."""
    device = allocator.device
    device.reserved_bytes += run.num_bytes
    device.keep_addresses(blocks[0].address)
    for block in blocks:
        if block.state == ALLOCATED:
            allocator.allocated_bytes += block.num_bytes
            in_use[block.address] = block
        else:
            block.pool.insert(block)
