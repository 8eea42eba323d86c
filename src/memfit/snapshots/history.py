"""A device's history in order: allocations with their numbers, frees, and what was given back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from memfit.allocator.blocks import (
    MIN_LARGE_BYTES,
    SEGMENT_ROUNDING_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
)

from .layout import (
    Layout,
    LayoutError,
    Region,
    Stretch,
    expandable_bases,
    layout_before,
    region_of,
    stretches_before,
)
from .records import BlockRecord, DeviceRecord, Entry, Frame, PoolKey
from .time_limit import TimeLimit

GIVEN_BACK = frozenset({"segment_free", "segment_unmap"})
TAKEN = frozenset({"segment_alloc", "segment_map"})
_MOST_FRAMES = 200
"""How deep stacks are looked into; real ones have some dozens."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation: how much, where it goes back to, and from where it was asked for."""

    requested_bytes: int
    pool: PoolKey
    frames: Sequence[Frame]
    category: str
    is_earlier: bool
    """Made before the first entry."""


@dataclass(slots=True)
class History:
    """A device's history, with its events numbered as those of a ``Trace`` are."""

    record: DeviceRecord
    allocations: list[Allocation] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    """``i`` allocates, ``-1 - i`` frees, as in ``Trace.events``. A block is freed where PyTorch
    could use it again (``free_completed``), which is later than the user's free if a second stream
    used it."""
    earlier: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Requested bytes and number of the blocks from before the first entry, by address: known from
    a free without an allocation, or from a block in use that no entry names."""
    events_before: list[int] = field(default_factory=list)
    """How many events there are before each entry."""
    time_limit: TimeLimit = field(default_factory=lambda: TimeLimit("the snapshot"))
    num_missing_frees: int = 0
    """Blocks that must have been freed without an entry that says so."""

    @property
    def entries(self) -> Sequence[Entry]:
        """Return the entries."""
        return self.record.entries

    def failures(self) -> list[int]:
        """Return the entries at which memory ran out."""
        return [index for index, each in enumerate(self.entries) if each.action == "oom"]

    def stretches(self) -> list[Stretch]:
        """Return the segments from before the first entry.

        Raises:
            LayoutError: if the entries do not lead to the segments in the end.
        """
        large_bytes = self.record.settings.large_segment_bytes
        segments = self.record.segments
        return stretches_before(self.entries, segments, large_bytes, self.time_limit)

    def start(self) -> Layout:
        """Place the blocks from before the first entry.

        Raises:
            LayoutError: if what is known of them contradicts itself.
        """
        return layout_before(self.stretches(), self.earlier, self._known(), self.record.settings)

    def bases(self) -> Mapping[Region, int]:
        """Return where the expandable segments from before the first entry begin."""
        large_bytes = self.record.settings.large_segment_bytes
        return expandable_bases(self.entries, self.stretches(), large_bytes)

    def follow(self, layout: Layout) -> Iterator[int]:
        """Carry out entry by entry, and yield the number of each before it is carried out.

        Raises:
            LayoutError: if an entry contradicts those before it.
        """
        if self.num_missing_frees:
            msg = f"{self.num_missing_frees:,} frees are missing"
            raise LayoutError(msg)
        large_bytes = self.record.settings.large_segment_bytes
        for index, entry in enumerate(self.entries):
            if not index % 64:
                self.time_limit.check()
            yield index
            if entry.action == "alloc":
                layout.allocate(
                    entry.address, entry.num_bytes, self.events[self.events_before[index]]
                )
            elif entry.action == "free_completed":
                layout.free(entry.address)
            elif entry.action in TAKEN:
                layout.add(entry.address, entry.num_bytes, region_of(entry, large_bytes))
            elif entry.action in GIVEN_BACK:
                layout.remove(entry.address, entry.num_bytes)

    def _known(self) -> Mapping[int, BlockRecord]:
        """Return the blocks from before the first entry that are there in the end."""
        freed = {-1 - event for event in self.events if event < 0}
        return {
            block.address: block
            for segment in self.record.segments
            for block in segment.blocks
            if block.address in self.earlier and self.earlier[block.address][1] not in freed
        }


def history_of(record: DeviceRecord, time_limit: TimeLimit | None = None) -> History:
    """Number the allocations of a record, and find those from before its first entry."""
    history = History(record)
    if time_limit is not None:
        history.time_limit = time_limit
    alive: dict[int, int] = {}
    for entry in record.entries:
        history.events_before.append(len(history.events))
        if entry.action == "alloc":
            if entry.address in alive:
                history.num_missing_frees += 1
                history.events.append(-1 - alive.pop(entry.address))
                history.events_before[-1] += 1
            alive[entry.address] = _add(history, entry, is_earlier=False)
            history.events.append(alive[entry.address])
        elif entry.action == "free_completed":
            if entry.address not in alive:
                if entry.address in history.earlier:
                    history.num_missing_frees += 1
                    continue
                number = _add(history, entry, is_earlier=True)
                history.earlier[entry.address] = (entry.num_bytes, number)
                alive[entry.address] = number
            history.events.append(-1 - alive.pop(entry.address))
    _add_blocks(history, alive)
    return history


def _add(history: History, entry: Entry, *, is_earlier: bool) -> int:
    # Where a free has a stack, it is that of the free.
    frames = () if is_earlier else entry.frames
    allocation = Allocation(entry.num_bytes, entry.pool, frames, entry.category, is_earlier)
    history.allocations.append(allocation)
    return len(history.allocations) - 1


def _add_blocks(history: History, alive: dict[int, int]) -> None:
    """Add the blocks in use that no entry names; those that are gone were freed unseen."""
    there = set()
    for segment in history.record.segments:
        for block in segment.blocks:
            if not block.in_use:
                continue
            there.add(block.address)
            if block.address not in alive and block.address not in history.earlier:
                number = len(history.allocations)
                history.allocations.append(
                    Allocation(block.requested_bytes, segment.pool, block.frames, "", True)
                )
                history.earlier[block.address] = (block.requested_bytes, number)
            elif block.address not in alive:
                history.num_missing_frees += 1
    if history.record.segments:
        history.num_missing_frees += sum(address not in there for address in alive)


@dataclass(frozen=True, slots=True)
class Release:
    """A place where cached memory was given back by the program itself, not for want of memory."""

    before_event: int
    pool: PoolKey | None
    """The private pool that was given up; None for ``empty_cache``."""


def releases_of(
    history: History, *, limit_bytes: int | None, reserved_bytes: int, until: int
) -> list[Release]:
    """Find where the program gave cached memory back.

    The allocator gives it back as well when the device has no more, right before it asks again; a
    replay does that by itself. The two are told apart by the stack, where there is one: it names
    ``empty_cache``. Else a release right before a request to the device is for want of memory if
    the request would not have fit. What preceded a failure that is not the one looked at is taken
    as given back too: that failure is part of what happened.

    Args:
        history: the events.
        limit_bytes: what the allocator could hold; None takes every release as the program's.
        reserved_bytes: held before the first entry.
        until: the entry that is looked at; nothing from there on counts.
    """
    releases = []
    index, entries = 0, history.entries
    while index < until:
        entry = entries[index]
        if entry.action in TAKEN:
            reserved_bytes += entry.num_bytes
        if entry.action not in GIVEN_BACK:
            index += 1
            continue
        end = _end_of_release(entries, index)
        if not _is_want(entries, (index, end), reserved_bytes, limit_bytes, until):
            position = history.events_before[index]
            releases += [Release(position, pool) for pool in sorted_pools(entries[index:end])]
        reserved_bytes -= sum(
            each.num_bytes for each in entries[index:end] if each.action in GIVEN_BACK
        )
        index = end
    return releases


def sorted_pools(entries: Sequence[Entry]) -> list[PoolKey | None]:
    """Return the private pools that entries give back, and None for all others together."""
    found = {each.pool for each in entries if each.action in GIVEN_BACK}
    private = [pool for pool in found if pool.is_private]
    common: list[PoolKey | None] = [None] if len(private) < len(found) else []
    return [*common, *sorted(private, key=lambda pool: (pool.owner, pool.stream))]


def _end_of_release(entries: Sequence[Entry], index: int) -> int:
    """Return the first entry that has nothing to do with a release."""
    while index < len(entries) and entries[index].action in GIVEN_BACK | {"free_completed"}:
        index += 1
    return index


def _is_want(
    entries: Sequence[Entry],
    release: tuple[int, int],
    reserved_bytes: int,
    limit_bytes: int | None,
    until: int,
) -> bool:
    """Tell whether memory was given back because the device had no more."""
    index, end = release
    following = entries[end] if end < len(entries) else None
    if limit_bytes is None or following is None:
        return False
    if following.action == "oom":
        return end == until
    if following.action not in TAKEN or any(
        isinstance(frame, dict) and frame.get("name") == "empty_cache"
        for frame in entries[index].frames[:_MOST_FRAMES]
    ):
        return False
    return reserved_bytes + following.num_bytes > limit_bytes


def segment_bytes_for(request_bytes: int, large_segment_bytes: int) -> int:
    """Return what the device is asked for so that a request can be served.

    Source: get_allocation_size.
    """
    if request_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if request_bytes < MIN_LARGE_BYTES:
        return large_segment_bytes
    return -(-request_bytes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES
