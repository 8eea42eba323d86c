"""Replays a recorded step through the caching allocator: peaks, fragmentation, and whether it fits.

``simulate.py`` adds up rounded sizes; here every segment is modelled, so reserved memory and the
end of a device's memory are answered too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from memfit.allocator.blocks import SEGMENT_ROUNDING_BYTES, Block
from memfit.allocator.caching import CachingAllocator, DeviceExhaustedError
from memfit.allocator.settings import AllocatorSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The peaks of one stretch of events, from one reset of the peaks to the next."""

    first_event: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorOutcome:
    """What became of a recorded step in the allocator."""

    peak_allocated_bytes: int
    """Sizes of the blocks in use. A block may be larger than its rounded request, because the
    remainder was too small to be split off; PyTorch counts it whole, and so does this."""
    peak_reserved_bytes: int
    end_allocated_bytes: int
    end_reserved_bytes: int
    fragmentation_fraction: float
    """The part of the reserved memory not in use, right after reserved first reached its peak."""
    survived: bool
    failed_event: int | None
    """The event whose request the device could not serve; nothing after it was replayed."""
    num_retries: int
    num_device_allocations: int
    windows: tuple[Window, ...]
    """One per mark, up to the next mark or the end; marks behind a failure have none."""
    block_bytes: Sequence[int] = field(default=(), repr=False)
    """By allocation: the block that served it, which may be larger; 0 for what took nothing."""


def simulate_events(
    events: Sequence[int],
    sizes: Sequence[int],
    *,
    streams: Sequence[int] | None = None,
    settings: AllocatorSettings | None = None,
    capacity_bytes: int | None = None,
    marks: Sequence[int] = (),
    releases: Sequence[int] = (),
) -> AllocatorOutcome:
    """Replay events through the allocator. Cost: one pass.

    Args:
        events: ``i`` allocates ``sizes[i]`` bytes, ``-1 - i`` frees them, as in ``Trace.events``.
        sizes: requested bytes by allocation; a request of 0 bytes takes nothing.
        streams: the stream of each allocation, which has a pool of its own; None for one stream.
        settings: how the allocator is set; None for its defaults.
        capacity_bytes: what the device gives in all; None means no end.
        marks: positions in ``events``, ascending, before which the peaks are reset.
        releases: positions, ascending, before which cached memory is given back (``empty_cache``).

    Raises:
        UsageError: if a memory fraction is set without a capacity.
        ValueError: if the marks are not ascending positions, or an event frees what is not alive.
    """
    bounds = [0, *marks, len(events)]
    if any(first > second for first, second in pairwise(bounds)):
        msg = f"marks {list(marks)} are not ascending positions among {len(events)} events"
        raise ValueError(msg)
    run = _Replay(CachingAllocator(settings, capacity_bytes), sizes, streams)
    windows = []
    peak_allocated_bytes = 0
    for number, (first, last) in enumerate(pairwise(bounds)):
        if run.failed_event is not None:
            break
        run.allocator.reset_peaks()
        for begin, end in pairwise([first, *_between(releases, first, last), last]):
            if begin in releases:
                run.allocator.empty_cache()
            run.replay(events, begin, end)
        window = Window(
            first_event=first,
            peak_allocated_bytes=run.allocator.peak_allocated_bytes,
            peak_reserved_bytes=run.allocator.peak_reserved_bytes,
        )
        peak_allocated_bytes = max(peak_allocated_bytes, window.peak_allocated_bytes)
        if number > 0:
            windows.append(window)
    return _outcome(run, peak_allocated_bytes, tuple(windows))


class _Replay:
    """One replay under way."""

    def __init__(
        self, allocator: CachingAllocator, sizes: Sequence[int], streams: Sequence[int] | None
    ) -> None:
        self.allocator = allocator
        self.failed_event: int | None = None
        self.allocated_at_highest_bytes = 0
        self.block_bytes = [0] * len(sizes)
        self._sizes = sizes
        self._streams = streams if streams is not None and any(streams) else [0] * len(sizes)
        self._alive: dict[int, Block] = {}

    def replay(self, events: Sequence[int], first: int, last: int) -> None:
        """Replay the events from first to before last, or up to the one that fails."""
        allocate, free = self.allocator.allocate, self.allocator.free
        device = self.allocator.device
        alive, sizes, streams = self._alive, self._sizes, self._streams
        highest_bytes = device.highest_reserved_bytes
        for position in range(first, last):
            event = events[position]
            if event < 0:
                block = alive.pop(-1 - event, None)
                if block is not None:
                    free(block)
                elif sizes[-1 - event]:
                    msg = f"event {position} frees allocation {-1 - event}, which is not alive"
                    raise ValueError(msg)
            elif sizes[event]:
                try:
                    block = alive[event] = allocate(sizes[event], streams[event])
                except DeviceExhaustedError:
                    self.failed_event = position
                    return
                self.block_bytes[event] = block.num_bytes
                if device.highest_reserved_bytes > highest_bytes:
                    highest_bytes = device.highest_reserved_bytes
                    self.allocated_at_highest_bytes = self.allocator.allocated_bytes


def _between(positions: Sequence[int], first: int, last: int) -> list[int]:
    """Return the positions inside a range whose ends are handled anyway."""
    return [position for position in positions if first < position < last]


def _outcome(
    run: _Replay, peak_allocated_bytes: int, windows: tuple[Window, ...]
) -> AllocatorOutcome:
    """Sum up a finished replay."""
    device = run.allocator.device
    highest_bytes = device.highest_reserved_bytes
    unused_bytes = highest_bytes - run.allocated_at_highest_bytes
    return AllocatorOutcome(
        peak_allocated_bytes=peak_allocated_bytes,
        peak_reserved_bytes=highest_bytes,
        end_allocated_bytes=run.allocator.allocated_bytes,
        end_reserved_bytes=device.reserved_bytes,
        fragmentation_fraction=unused_bytes / highest_bytes if highest_bytes else 0.0,
        survived=run.failed_event is None,
        failed_event=run.failed_event,
        num_retries=run.allocator.num_retries,
        num_device_allocations=device.num_allocations,
        windows=windows,
        block_bytes=run.block_bytes,
    )


def smallest_capacity_bytes(
    events: Sequence[int],
    sizes: Sequence[int],
    settings: AllocatorSettings | None = None,
    streams: Sequence[int] | None = None,
) -> int:
    """Find the least capacity, a multiple of 2 MiB, under which a step survives.

    It can be below the peak of reserved memory, because cached segments are given back when the
    device has no more. Searched by bisection between the peak of rounded requests and a capacity
    that surely suffices; 2 MiB less than the result fails. More capacity can, in rare orders of
    events, be worse than less, so an even smaller capacity that survives is not excluded.

    Cost: one replay per halving, each up to its failure.
    """
    settings = settings or AllocatorSettings()
    replayed = partial(simulate_events, events, sizes, streams=streams)
    unbounded = replace(
        settings, per_process_memory_fraction=None, garbage_collection_threshold=0.0
    )
    peak_bytes = replayed(settings=unbounded).peak_reserved_bytes
    fraction = settings.per_process_memory_fraction or 1.0

    def survives(num_steps: int) -> bool:
        capacity_bytes = num_steps * SEGMENT_ROUNDING_BYTES
        return replayed(settings=settings, capacity_bytes=capacity_bytes).survived

    largest = _num_steps(int(peak_bytes / fraction) + 1 if fraction < 1.0 else peak_bytes)
    while not survives(largest):  # a fraction with garbage collection may need more than its share
        largest += largest // 8 + 1
    # Less than the peak of the rounded requests alone never suffices.
    rounded = CachingAllocator(unbounded).rounded
    current = peak = 0
    for event in events:
        if event >= 0:
            current += rounded(sizes[event])
            peak = max(peak, current)
        else:
            current -= rounded(sizes[-1 - event])
    smallest = _num_steps(peak)
    while smallest < largest:
        middle = (smallest + largest) // 2
        if survives(middle):
            largest = middle
        else:
            smallest = middle + 1
    return largest * SEGMENT_ROUNDING_BYTES


def _num_steps(num_bytes: int) -> int:
    return -(-num_bytes // SEGMENT_ROUNDING_BYTES)
