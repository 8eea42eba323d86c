"""One moment of a history: what was in use, by whom, and what was free and of no use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from memfit.allocator.blocks import SMALL_BYTES
from memfit.allocator.seeding import Piece

from .history import GIVEN_BACK, TAKEN, Allocation, History
from .layout import Layout, LayoutError, Region
from .records import PoolKey, SegmentRecord
from .result import FreeMemory, HeldMemory
from .stacks import Asking, asking
from .time_limit import TimeLimit

BEFORE_HISTORY = "(before the history began)"
NO_STACK = "(no stack recorded)"
NO_CATEGORY = "unknown"
_MOVES = GIVEN_BACK | TAKEN | {"alloc", "free_completed"}

Runs = Sequence[tuple[Region, Sequence[Piece]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class InUse:
    """A block in use at the moment."""

    num_bytes: int
    allocation: Allocation


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Memory at one moment."""

    in_use: Sequence[InUse]
    allocated_bytes: int
    reserved_bytes: int
    peak_reserved_bytes: int
    """Up to the moment."""
    runs: Runs | None
    """All segments with what lies in them; None where that cannot be followed."""
    problem: str = ""
    """Why it cannot."""


def picture_at(history: History, start: Layout | None, entry: int, problem: str) -> Picture:
    """Describe the moment right before an entry.

    Args:
        history: the events.
        start: the layout before the first entry, which is followed and changed; None if unknown.
        entry: the number of the entry; the length of the history for its end.
        problem: why the start is unknown.
    """
    try:
        if start is None:
            raise LayoutError(problem)
        return _followed(history, start, entry)
    except LayoutError as error:
        return _without_layout(history, entry, str(error))


def peak_entry(history: History, start: Layout | None) -> int:
    """Find the entry right after which the most memory is in use, and return the next one.

    Where the layout cannot be followed, the requested bytes are added up.
    """
    best, best_entry = -1, 0
    if start is not None:
        try:
            for entry in history.follow(start):
                if start.allocated_bytes > best:
                    best, best_entry = start.allocated_bytes, entry
        except LayoutError:
            pass
        else:
            return len(history.entries) if start.allocated_bytes > best else best_entry
    return _highest_sum(history)


def _highest_sum(history: History) -> int:
    current = sum(num_bytes for num_bytes, _ in history.earlier.values())
    best, best_entry, done = current, 0, 0
    ends = [*history.events_before[1:], len(history.events)]
    for entry, end in enumerate(ends[: len(history.entries)]):
        for event in history.events[done:end]:
            number = event if event >= 0 else -1 - event
            num_bytes = history.allocations[number].requested_bytes
            current += num_bytes if event >= 0 else -num_bytes
        done = end
        if current > best:
            best, best_entry = current, entry + 1
    return best_entry


def _followed(history: History, layout: Layout, until: int) -> Picture:
    peak_bytes = layout.reserved_bytes
    for entry in history.follow(layout):
        peak_bytes = max(peak_bytes, layout.reserved_bytes)
        if entry == until:
            break
    allocations = history.allocations
    return Picture(
        in_use=[
            InUse(num_bytes=held.num_bytes, allocation=allocations[held.allocation])
            for held in layout.held.values()
        ],
        allocated_bytes=layout.allocated_bytes,
        reserved_bytes=layout.reserved_bytes,
        peak_reserved_bytes=max(peak_bytes, layout.reserved_bytes),
        runs=list(layout.runs()),
    )


def _without_layout(history: History, until: int, problem: str) -> Picture:
    """Describe a moment by the segments in the end, if it is the end, else by the events alone."""
    later = [each for each in history.entries[until:] if each.action in _MOVES]
    segments = history.record.segments
    reserved_bytes = sum(segment.num_bytes for segment in segments)
    for entry in later:
        reserved_bytes += entry.num_bytes if entry.action in GIVEN_BACK else 0
        reserved_bytes -= entry.num_bytes if entry.action in TAKEN else 0
    if not later and segments:
        in_use, runs = _at_end(segments), [_run(segment) for segment in segments]
    else:
        in_use, runs = _by_events(history, until), None
    allocated_bytes = sum(block.num_bytes for block in in_use)
    reserved_bytes = max(reserved_bytes, allocated_bytes)
    return Picture(
        in_use=in_use,
        allocated_bytes=allocated_bytes,
        reserved_bytes=reserved_bytes,
        peak_reserved_bytes=reserved_bytes,
        runs=runs,
        problem=problem,
    )


def _at_end(segments: Iterable[SegmentRecord]) -> list[InUse]:
    return [
        InUse(
            num_bytes=block.num_bytes,
            allocation=Allocation(
                block.requested_bytes, segment.pool, block.frames, "", is_earlier=False
            ),
        )
        for segment in segments
        for block in segment.blocks
        if block.in_use
    ]


def _run(segment: SegmentRecord) -> tuple[Region, list[Piece]]:
    region = Region(segment.pool, segment.is_small, segment.is_expandable)
    return region, [
        Piece(address=block.address, num_bytes=block.num_bytes, in_use=block.in_use)
        for block in segment.blocks
    ]


def _by_events(history: History, until: int) -> list[InUse]:
    alive = dict.fromkeys(number for _, number in history.earlier.values())
    end = history.events_before[until] if until < len(history.entries) else len(history.events)
    for event in history.events[:end]:
        if event >= 0:
            alive[event] = None
        else:
            alive.pop(-1 - event, None)
    allocations = [history.allocations[number] for number in alive]
    return [InUse(num_bytes=each.requested_bytes, allocation=each) for each in allocations]


def free_memory(runs: Runs, request_bytes: int | None, pool: PoolKey | None) -> FreeMemory:
    """Add up what was free, by why it could not serve a request."""
    sizes, usable, returnable_bytes, other_bytes = [], [], 0, 0
    for region, pieces in runs:
        free = [piece.num_bytes for piece in pieces if not piece.in_use]
        sizes += free
        if len(pieces) == len(free) and not region.pool.is_private:
            returnable_bytes += sum(free)
        is_own = (
            not region.pool.is_private
            if request_bytes is None
            else region.pool == pool and region.is_small == (request_bytes <= SMALL_BYTES)
        )
        if is_own:
            usable += free
        else:
            other_bytes += sum(free)
    small = [num_bytes for num_bytes in usable if num_bytes < (request_bytes or 0)]
    return FreeMemory(
        total_bytes=sum(sizes),
        num_blocks=len(sizes),
        largest_block_bytes=max(sizes, default=0),
        largest_usable_block_bytes=None if request_bytes is None else max(usable, default=0),
        other_pools_bytes=other_bytes,
        too_small_bytes=sum(small),
        returnable_bytes=returnable_bytes,
    )


class Holders:
    """Blocks in use with who asked for each.

    Raises:
        DataError: if reading the stacks takes too long.
    """

    def __init__(self, blocks: Sequence[InUse], time_limit: TimeLimit) -> None:
        self._blocks = blocks
        self._asking: list[Asking] = []
        for block in blocks:
            time_limit.check()
            self._asking.append(asking(block.allocation.frames))

    def by_line(self) -> list[HeldMemory]:
        """Add up by the line that asked, largest first."""
        return self._grouped(_line_of)

    def by_doing(self) -> Mapping[str, int]:
        """Add up by what the program was doing, largest first."""
        groups = self._grouped(lambda _, who: (who.doing.value, ""))
        return {group.name: group.num_bytes for group in groups}

    def by_category(self) -> Mapping[str, int]:
        """Add up by the categories of torch's profiler; empty where it gave none."""
        if not any(block.allocation.category for block in self._blocks):
            return {}
        groups = self._grouped(lambda block, _: (block.allocation.category or NO_CATEGORY, ""))
        return {group.name: group.num_bytes for group in groups}

    def _grouped(self, name_of: Callable[[InUse, Asking], tuple[str, str]]) -> list[HeldMemory]:
        return _grouped(
            (block, name_of(block, who))
            for block, who in zip(self._blocks, self._asking, strict=True)
        )


def _line_of(block: InUse, who: Asking) -> tuple[str, str]:
    allocation = block.allocation
    if not allocation.frames:
        return (BEFORE_HISTORY if allocation.is_earlier else NO_STACK), ""
    return who.line or NO_STACK, who.called_from


def _grouped(named: Iterable[tuple[InUse, tuple[str, str]]]) -> list[HeldMemory]:
    num_bytes: dict[tuple[str, str], int] = {}
    counts: dict[tuple[str, str], int] = {}
    for block, name in named:
        num_bytes[name] = num_bytes.get(name, 0) + block.num_bytes
        counts[name] = counts.get(name, 0) + 1
    return [
        HeldMemory(name=name, num_bytes=total, num_blocks=counts[name, origin], called_from=origin)
        for (name, origin), total in sorted(num_bytes.items(), key=lambda item: -item[1])
    ]
