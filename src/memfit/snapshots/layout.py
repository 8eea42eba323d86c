"""Where blocks lie in the recorded segments, followed entry by entry.

An allocator takes the beginning of a free block, and a block that becomes free is merged with its
free neighbours at once. So free stretches are known by their beginnings and ends alone, and each
entry costs the same however much memory there is.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from memfit.allocator.blocks import SMALL_BYTES, SMALL_SEGMENT_BYTES
from memfit.allocator.caching import CachingAllocator
from memfit.allocator.seeding import Piece
from memfit.allocator.settings import AllocatorSettings

from .records import BlockRecord, Entry, PoolKey, SegmentRecord
from .time_limit import TimeLimit


class Region(NamedTuple):
    """What all of a segment has in common."""

    pool: PoolKey
    is_small: bool
    is_expandable: bool


class Held(NamedTuple):
    """A block in use."""

    num_bytes: int
    """As the allocator counts it: the rounded request, or a little more."""
    allocation: int
    region: Region


class LayoutError(ValueError):
    """Say where a history contradicts itself, so that the layout cannot be followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A segment, or a mapped stretch of an expandable one."""

    address: int
    num_bytes: int
    region: Region

    @property
    def end(self) -> int:
        """Return the first address behind it."""
        return self.address + self.num_bytes


class Layout:
    """Segments, blocks in use and free stretches at one moment of a history."""

    def __init__(self, settings: AllocatorSettings) -> None:
        self.reserved_bytes = 0
        self.allocated_bytes = 0
        self.held: dict[int, Held] = {}
        """By address."""
        self.rounded = CachingAllocator(settings).rounded
        self._settings = settings
        self._free: dict[int, tuple[int, Region]] = {}
        self._free_by_end: dict[int, int] = {}
        self._walls: dict[int, int] = {}
        """Addresses where a segment from cudaMalloc begins or ends: nothing is merged across."""

    def runs(self) -> Iterator[tuple[Region, list[Piece]]]:
        """Yield each segment, or mapped stretch, as its pieces from end to end."""
        pieces = [
            (Piece(address=address, num_bytes=held.num_bytes, in_use=True), held.region)
            for address, held in self.held.items()
        ]
        pieces += [
            (Piece(address=address, num_bytes=num_bytes, in_use=False), region)
            for address, (num_bytes, region) in self._free.items()
        ]
        run: list[Piece] = []
        before: Region | None = None
        end = -1
        for piece, region in sorted(pieces, key=lambda each: each[0].address):
            if piece.address != end or region != before or self._walls.get(end):
                if before is not None:
                    yield before, run
                run, before = [], region
            run.append(piece)
            end = piece.address + piece.num_bytes
        if before is not None:
            yield before, run

    def allocate(self, address: int, requested_bytes: int, allocation: int) -> None:
        """Take the beginning of a free stretch.

        Raises:
            LayoutError: if no free stretch begins there, or it is too short.
        """
        num_bytes, region = self._free.get(address, (-1, None))
        rounded_bytes = self.rounded(requested_bytes)
        if region is None or num_bytes < rounded_bytes:
            msg = f"{requested_bytes:,} bytes at {address:#x} are not in a free part of a segment"
            raise LayoutError(msg)
        self._take_free(address)
        taken_bytes = self.taken_bytes(rounded_bytes, num_bytes, region)
        if taken_bytes < num_bytes:
            self._add_free(address + taken_bytes, num_bytes - taken_bytes, region)
        self.hold(address, Held(taken_bytes, allocation, region))

    def hold(self, address: int, held: Held) -> None:
        """Count a block as in use."""
        self.held[address] = held
        self.allocated_bytes += held.num_bytes

    def free(self, address: int) -> None:
        """Free a block and merge it with its free neighbours."""
        held = self.held.pop(address)
        self.allocated_bytes -= held.num_bytes
        self._merge(address, held.num_bytes, held.region)

    def add(self, address: int, num_bytes: int, region: Region) -> None:
        """Add memory that the device has given."""
        self.reserved_bytes += num_bytes
        if not region.is_expandable:
            self._add_walls(address, num_bytes)
        self._merge(address, num_bytes, region)

    def open(self, stretch: Stretch) -> None:
        """Count a segment whose blocks and free stretches are added by hand."""
        self.reserved_bytes += stretch.num_bytes
        if not stretch.region.is_expandable:
            self._add_walls(stretch.address, stretch.num_bytes)

    def fill(self, begin: int, end: int, region: Region) -> None:
        """Add a free stretch between neighbours that are not free."""
        if end > begin:
            self._add_free(begin, end - begin, region)

    def _add_walls(self, address: int, num_bytes: int) -> None:
        """Let nothing be merged across the ends of a segment."""
        for end in (address, address + num_bytes):
            self._walls[end] = self._walls.get(end, 0) + 1

    def remove(self, address: int, num_bytes: int) -> None:
        """Remove memory that is given back to the device.

        Raises:
            LayoutError: if it is not free, or a part of a segment from cudaMalloc.
        """
        begin = address if address in self._free else self._free_around(address)
        found_bytes, region = self._free.get(begin, (0, None))
        if region is None or begin + found_bytes < address + num_bytes:
            msg = f"{num_bytes:,} bytes at {address:#x} are given back and were not free"
            raise LayoutError(msg)
        self._take_free(begin)
        self.reserved_bytes -= num_bytes
        if not region.is_expandable:
            if found_bytes != num_bytes:
                msg = f"a part of the segment at {begin:#x} is given back"
                raise LayoutError(msg)
            for end in (address, address + num_bytes):
                self._walls[end] -= 1
        if begin < address:
            self._add_free(begin, address - begin, region)
        if begin + found_bytes > address + num_bytes:
            behind = address + num_bytes
            self._add_free(behind, begin + found_bytes - behind, region)

    def taken_bytes(self, rounded_bytes: int, free_bytes: int, region: Region) -> int:
        """Return how much of a free block a request takes: all, if too little would remain.

        Source: should_split.
        """
        remainder_bytes = free_bytes - rounded_bytes
        is_always_split = region.is_small or self._settings.expandable_segments
        if is_always_split or remainder_bytes < 0:
            return rounded_bytes
        limit_bytes = self._settings.max_split_size_bytes
        is_split = remainder_bytes > SMALL_BYTES and (
            limit_bytes is None or rounded_bytes < limit_bytes
        )
        return rounded_bytes if is_split else free_bytes

    def _merge(self, address: int, num_bytes: int, region: Region) -> None:
        end = address + num_bytes
        if not self._walls.get(address) and address in self._free_by_end:
            before = self._free_by_end[address]
            num_bytes += self._take_free(before)
            address = before
        if not self._walls.get(end) and end in self._free:
            num_bytes += self._take_free(end)
        self._add_free(address, num_bytes, region)

    def _add_free(self, address: int, num_bytes: int, region: Region) -> None:
        self._free[address] = (num_bytes, region)
        self._free_by_end[address + num_bytes] = address

    def _take_free(self, address: int) -> int:
        num_bytes, _ = self._free.pop(address)
        del self._free_by_end[address + num_bytes]
        return num_bytes

    def _free_around(self, address: int) -> int:
        """Find the free stretch that an address lies in; unmapping starts inside one, rarely."""
        for begin, (num_bytes, _) in self._free.items():
            if begin <= address < begin + num_bytes:
                return begin
        return -1


def stretches_before(
    entries: Sequence[Entry],
    segments: Iterable[SegmentRecord],
    large_segment_bytes: int,
    time_limit: TimeLimit,
) -> list[Stretch]:
    """Walk back from the segments in the end to those before the first entry.

    Raises:
        LayoutError: if what was given back is still there, or what was taken is not.
    """
    now = _Stretches(
        Stretch(
            address=each.address,
            num_bytes=each.num_bytes,
            region=Region(each.pool, each.is_small, each.is_expandable),
        )
        for each in segments
    )
    for number, entry in enumerate(reversed(entries)):
        if not number % 64:
            time_limit.check()
        if entry.action in {"segment_alloc", "segment_map"}:
            now.remove(entry.address, entry.num_bytes)
        elif entry.action in {"segment_free", "segment_unmap"}:
            now.add(entry.address, entry.num_bytes, region_of(entry, large_segment_bytes))
    return now.in_order()


def region_of(entry: Entry, large_segment_bytes: int) -> Region:
    """Tell what kind of segment an entry is about.

    Segments of the small pool have 2 MiB, those of the large one at least 10 MiB; mappings are
    whole granules of 2 MiB and, in the large pool, 20 MiB.
    """
    is_expandable = entry.action in {"segment_map", "segment_unmap"}
    granule = large_segment_bytes if is_expandable else SMALL_SEGMENT_BYTES + 1
    is_small = entry.num_bytes % granule != 0 if is_expandable else entry.num_bytes < granule
    return Region(entry.pool, is_small, is_expandable)


def expandable_bases(
    entries: Sequence[Entry], stretches: Iterable[Stretch], large_segment_bytes: int
) -> dict[Region, int]:
    """Find where the expandable segments from before the first entry begin.

    A segment says it nowhere; the lowest address that is ever mapped is where it began, as long as
    something in it is mapped. After that its addresses are given up, and others begin.
    """
    bases: dict[Region, int] = {}
    mapped_bytes: dict[Region, int] = {}
    for stretch in stretches:
        if stretch.region.is_expandable:
            bases.setdefault(stretch.region, stretch.address)
            mapped = mapped_bytes.get(stretch.region, 0)
            mapped_bytes[stretch.region] = mapped + stretch.num_bytes
    for entry in entries:
        if entry.action not in {"segment_map", "segment_unmap"}:
            continue
        region = region_of(entry, large_segment_bytes)
        if mapped_bytes.get(region, 0) <= 0:
            continue
        is_map = entry.action == "segment_map"
        mapped_bytes[region] += entry.num_bytes if is_map else -entry.num_bytes
        bases[region] = min(bases[region], entry.address)
    return bases


class _Stretches:
    """Stretches in the order of their addresses; mapped ones that touch become one."""

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        self._sorted = sorted(stretches, key=lambda each: each.address)
        self._addresses = [each.address for each in self._sorted]

    def in_order(self) -> list[Stretch]:
        return self._sorted

    def add(self, address: int, num_bytes: int, region: Region) -> None:
        index = bisect_left(self._addresses, address)
        before = self._sorted[index - 1] if index else None
        behind = self._sorted[index] if index < len(self._sorted) else None
        end = address + num_bytes
        if (before and before.end > address) or (behind and behind.address < end):
            msg = f"memory at {address:#x} is given back twice"
            raise LayoutError(msg)
        if region.is_expandable and before and before.end == address and before.region == region:
            address, index = before.address, index - 1
            self._take(index)
        if region.is_expandable and behind and behind.address == end and behind.region == region:
            end = behind.end
            self._take(index)
        self._put(index, Stretch(address=address, num_bytes=end - address, region=region))

    def remove(self, address: int, num_bytes: int) -> None:
        index = bisect_right(self._addresses, address) - 1
        found = self._sorted[index] if index >= 0 else None
        end = address + num_bytes
        if found is None or found.end < end:
            msg = f"memory that was taken at {address:#x} is in no segment"
            raise LayoutError(msg)
        self._take(index)
        for begin, stop in ((end, found.end), (found.address, address)):
            if stop > begin:
                self._put(
                    index, Stretch(address=begin, num_bytes=stop - begin, region=found.region)
                )

    def _take(self, index: int) -> None:
        del self._sorted[index], self._addresses[index]

    def _put(self, index: int, stretch: Stretch) -> None:
        self._sorted.insert(index, stretch)
        self._addresses.insert(index, stretch.address)


def layout_before(
    stretches: Sequence[Stretch],
    earlier: Mapping[int, tuple[int, int]],
    known: Mapping[int, BlockRecord],
    settings: AllocatorSettings,
) -> Layout:
    """Place the blocks from before the first entry into their segments.

    Args:
        stretches: the segments then, in the order of their addresses.
        earlier: requested bytes and number of each block, by its address.
        known: the blocks that are still there in the end, with their true sizes.
        settings: the recorded ones.

    Raises:
        LayoutError: if blocks overlap, or lie in no segment.
    """
    layout = Layout(settings)
    addresses = sorted(earlier)
    position = 0
    for stretch in stretches:
        last = bisect_left(addresses, stretch.end)
        own = addresses[position:last]
        if own and own[0] < stretch.address:
            break
        layout.open(stretch)
        begin = stretch.address
        for address, behind in pairwise([*own, stretch.end]):
            held = _placed(layout, stretch.region, earlier[address], behind - address)
            if address in known:
                held = held._replace(num_bytes=known[address].num_bytes)
            if held.num_bytes > behind - address:
                msg = f"the block at {address:#x} overlaps the one at {behind:#x}"
                raise LayoutError(msg)
            layout.fill(begin, address, stretch.region)
            layout.hold(address, held)
            begin = address + held.num_bytes
        layout.fill(begin, stretch.end, stretch.region)
        position = last
    if position < len(addresses):
        msg = f"the block at {addresses[position]:#x} lies in no segment"
        raise LayoutError(msg)
    return layout


def _placed(layout: Layout, region: Region, block: tuple[int, int], room_bytes: int) -> Held:
    """Tell how much a block takes: what is too little to be split off belongs to it."""
    requested_bytes, allocation = block
    num_bytes = layout.taken_bytes(layout.rounded(requested_bytes), room_bytes, region)
    return Held(num_bytes, allocation, region)
