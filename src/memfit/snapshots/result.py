"""What a snapshot tells, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """The request that could not be served."""

    num_bytes: int
    """As the allocator rounded it; a little more than the tensor may have asked for."""
    line: str
    """Who asked: the innermost line outside torch; empty where no stack was recorded."""
    called_from: str
    """The innermost line of the user's own files, where that is another one."""
    doing: str
    stream: int
    is_private: bool
    """Whether it went to the pool of a CUDA graph or a MemPool."""
    device_free_bytes: int
    """What the device still had, by its own account."""
    missing_bytes: int | None
    """How much more the device would have had to give; None where the device had enough, so that
    something else refused it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """What the allocator held and nothing used, at the moment."""

    total_bytes: int
    num_blocks: int
    largest_block_bytes: int
    largest_usable_block_bytes: int | None
    """Of those that the request could have taken: its own stream and pool. None without one."""
    other_pools_bytes: int
    """In blocks of other streams, of private pools, or of the other size class; of all free memory
    where there is no request, in private pools."""
    too_small_bytes: int
    """In blocks of the request's own pool, each of them smaller than it."""
    returnable_bytes: int
    """In whole segments, which are given back before a request is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMemory:
    """Blocks in use with something in common."""

    name: str
    num_bytes: int
    num_blocks: int
    called_from: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What would have become of the same events under other settings."""

    settings: str
    """As PYTORCH_ALLOC_CONF says it; empty for the defaults."""
    is_recorded: bool
    survives: bool | None
    """None where that cannot be known, or nothing failed and no limit was given."""
    least_reduction_bytes: int | None
    """How much smaller the failed request must be at least to be served; 0 if it was served, None
    where that would not do or is not known."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    """Up to the moment, of the replay from the recorded start where there are two."""
    failed_request_bytes: int | None
    """A request before the moment that would have failed already."""
    is_guess: bool
    """Whether the answer rests on how blocks from before the history would have lain, or on a
    replay that does not meet every recorded call to the device."""
    reason: str
    """Why it cannot be known, or what failed instead; empty where there is nothing to say."""
    needs: str
    """What these settings need besides; empty for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far the replay under the recorded settings does what was recorded."""

    is_reproduced: bool
    """Whether it ends as the record does: refused at the same request, or with the same peak."""
    recorded_peak_reserved_bytes: int
    simulated_peak_reserved_bytes: int
    num_recorded_segments: int
    """Calls to the device for memory."""
    num_equal_segments: int
    """How many of them the replay makes in the same order with the same bytes, from the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotReplay:
    """A memory snapshot of one device, explained and replayed."""

    kind: str
    """``failure`` or ``peak``: which moment is described."""
    source: str
    device: int
    num_entries: int
    num_failures: int
    num_earlier_blocks: int
    """Blocks in use before the first entry: where the history began, or what it has forgotten."""
    earlier_bytes: int
    entry: int | None
    """The entry that is described, counted from 0: the failure, or the first one after the peak.
    None where only the end is known."""
    settings: str
    """The recorded ones."""
    allocated_bytes: int
    reserved_bytes: int
    limit_bytes: int | None
    """What the allocator could hold at the moment."""
    limit_source: str
    request: FailedRequest | None
    free: FreeMemory | None
    """None where the history does not say where blocks lay."""
    by_line: Sequence[HeldMemory]
    """Largest first."""
    by_doing: Mapping[str, int]
    by_category: Mapping[str, int]
    """Empty unless torch's profiler wrote it."""
    outcomes: Sequence[Outcome]
    agreement: Agreement | None
    notes: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values under the names of the fields."""
        return asdict(self)
