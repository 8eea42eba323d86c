"""Replays a history under other settings: would the request that failed have been served?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memfit.allocator.blocks import MIN_BLOCK_BYTES, MIN_LARGE_BYTES, SMALL_BYTES, Block
from memfit.allocator.caching import CachingAllocator, DeviceExhaustedError
from memfit.allocator.seeding import Run, seed
from memfit.allocator.settings import AllocatorSettings

from .history import History, Release
from .layout import Layout
from .records import PoolKey

_ALMOST_ALL = 1.0 - 2.0**-30
"""A memory fraction that takes nothing away; without one below 1 nothing is collected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is replayed: the events up to a moment, and the request that is made there."""

    num_events: int
    request_bytes: int | None
    """None where nothing failed: then the events are all there is."""
    pool: PoolKey | None
    limit_bytes: int | None
    """What the allocator may hold; None means no end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What became of one replay."""

    peak_allocated_bytes: int
    """Up to the moment, without its request."""
    peak_reserved_bytes: int
    failed_allocation: int | None
    """The allocation before the moment that was refused; None if all were served."""
    failed_request_bytes: int | None
    is_served: bool
    """Whether all was served, the request of the moment as well."""
    least_reduction_bytes: int | None
    """How much smaller the request must be at least to be served; None if that would not do, or
    something before it fails."""
    device_calls: Sequence[tuple[str, int]]
    """What was asked of the device and given back to it, in order."""


class Replayer:
    """Replays one history from its start, as often as it is asked.

    Args:
        history: the events.
        start: the segments and blocks before the first event; None if they cannot be known.
        releases: where the program gave cached memory back, in order.
    """

    def __init__(self, history: History, start: Layout | None, releases: Sequence[Release]) -> None:
        self._history = history
        runs = () if start is None else tuple(start.runs())
        keys = dict.fromkeys(allocation.pool for allocation in history.allocations)
        keys |= dict.fromkeys(region.pool for region, _ in runs)
        self._streams: dict[PoolKey, int] = {key: number for number, key in enumerate(keys)}
        self._runs = [
            Run(
                stream=self._streams[region.pool],
                is_small=region.is_small,
                is_expandable=region.is_expandable,
                pieces=pieces,
            )
            for region, pieces in runs
        ]
        self._releases = releases
        self._bases = {
            (self._streams[region.pool], region.is_small): base
            for region, base in (history.bases() if start is not None else {}).items()
        }

    def run(self, settings: AllocatorSettings, moment: Moment, *, is_packed: bool) -> Trial:
        """Replay up to a moment and make its request.

        Args:
            settings: how the allocator is set.
            moment: where to stop, and what to ask for there.
            is_packed: begin with the earlier blocks one behind the other, in the order of their
                addresses, instead of with the recorded segments.
        """
        allocator, failed = self._replay(settings, moment, is_packed=is_packed)
        peak_allocated_bytes = allocator.peak_allocated_bytes
        peak_reserved_bytes = allocator.device.highest_reserved_bytes
        calls = tuple(allocator.device.log)
        reduction_bytes: int | None = None
        if failed is None and moment.request_bytes is not None:
            reduction_bytes = self._least_reduction(allocator, moment)
            if reduction_bytes:
                reduction_bytes = self._confirmed(settings, moment, reduction_bytes, is_packed)
        allocations = self._history.allocations
        return Trial(
            peak_allocated_bytes=peak_allocated_bytes,
            peak_reserved_bytes=peak_reserved_bytes,
            failed_allocation=failed,
            failed_request_bytes=None if failed is None else allocations[failed].requested_bytes,
            is_served=failed is None and (moment.request_bytes is None or reduction_bytes == 0),
            least_reduction_bytes=reduction_bytes,
            device_calls=calls,
        )

    def _replay(
        self, settings: AllocatorSettings, moment: Moment, *, is_packed: bool
    ) -> tuple[CachingAllocator, int | None]:
        """Replay the events up to a moment; the second result is the allocation that failed."""
        if settings.garbage_collection_threshold and moment.limit_bytes is not None:
            settings = replace(settings, per_process_memory_fraction=_ALMOST_ALL)
        private = [number for key, number in self._streams.items() if key.is_private]
        allocator = CachingAllocator(settings, moment.limit_bytes, private)
        alive: dict[int, Block] = {}
        earlier = self._history.earlier
        if not is_packed:
            blocks = seed(allocator, self._runs, self._bases)
            alive = {number: blocks[address] for address, (_, number) in earlier.items()}
        else:
            first = [number for _, (_, number) in sorted(earlier.items())]
            failed = self._carry_out(allocator, first, alive)
            if failed is not None:
                return allocator, failed
        allocator.device.log.clear()
        begin, events = 0, self._history.events
        for release in self._releases:
            self._history.time_limit.check()
            failed = self._carry_out(allocator, events[begin : release.before_event], alive)
            if failed is not None:
                return allocator, failed
            begin = release.before_event
            if release.pool is None:
                allocator.empty_cache()
            else:
                allocator.release(self._streams.get(release.pool, -1))
        return allocator, self._carry_out(allocator, events[begin : moment.num_events], alive)

    def _carry_out(
        self, allocator: CachingAllocator, events: Sequence[int], alive: dict[int, Block]
    ) -> int | None:
        """Carry out events; gives the allocation at which memory ran out."""
        allocations, streams = self._history.allocations, self._streams
        for position, event in enumerate(events):
            if not position % 64:
                self._history.time_limit.check()
            if event < 0:
                block = alive.pop(-1 - event, None)
                if block is not None:
                    allocator.free(block)
                continue
            allocation = allocations[event]
            if allocation.requested_bytes:
                try:
                    alive[event] = allocator.allocate(
                        allocation.requested_bytes, streams[allocation.pool]
                    )
                except DeviceExhaustedError:
                    return event
        return None

    def _least_reduction(self, allocator: CachingAllocator, moment: Moment) -> int | None:
        """Ask for less and less, in steps of the allocator's rounding.

        Within what the small pool serves, within what shares segments, and within what has segments
        of its own, less is never harder to serve than more; between them it can be.
        """
        assert moment.request_bytes is not None, "only a request can be reduced"
        stream = -1 if moment.pool is None else self._streams.get(moment.pool, -1)
        request_bytes = moment.request_bytes
        if _serves(allocator, request_bytes, stream):
            return 0
        for least_bytes, most_bytes in (
            (MIN_LARGE_BYTES, request_bytes),
            (SMALL_BYTES + MIN_BLOCK_BYTES, MIN_LARGE_BYTES),
            (MIN_BLOCK_BYTES, SMALL_BYTES + MIN_BLOCK_BYTES),
        ):
            low, high = least_bytes, min(most_bytes, request_bytes)
            if low >= high or not _serves(allocator, low, stream):
                continue
            while high - low > MIN_BLOCK_BYTES:
                middle = low + (high - low) // MIN_BLOCK_BYTES // 2 * MIN_BLOCK_BYTES
                if middle == low:
                    break
                low, high = (middle, high) if _serves(allocator, middle, stream) else (low, middle)
            return request_bytes - low
        return None

    def _confirmed(
        self, settings: AllocatorSettings, moment: Moment, reduction_bytes: int, is_packed: bool
    ) -> int | None:
        """Replay all of it once more with the smaller request, which was found after a refusal."""
        assert moment.request_bytes is not None, "only a request can be reduced"
        allocator, _ = self._replay(settings, moment, is_packed=is_packed)
        stream = -1 if moment.pool is None else self._streams.get(moment.pool, -1)
        is_served = _serves(allocator, moment.request_bytes - reduction_bytes, stream)
        return reduction_bytes if is_served else None


def _serves(allocator: CachingAllocator, num_bytes: int, stream: int) -> bool:
    """Try a request and take it back."""
    try:
        block = allocator.allocate(num_bytes, stream)
    except DeviceExhaustedError:
        return False
    allocator.free(block)
    return True
