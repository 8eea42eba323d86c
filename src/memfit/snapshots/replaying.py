"""The way from a file to an answer: read, find the moment, describe it, try other settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.allocator.settings import AllocatorSettings
from memfit.units import format_bytes

from .files import ReadLimits, load_content
from .history import History, history_of, releases_of, segment_bytes_for
from .layout import Layout, LayoutError
from .picture import (
    Holders,
    Picture,
    free_memory,
    peak_entry,
    picture_at,
)
from .reading import read_device
from .records import Entry
from .result import FailedRequest, SnapshotReplay
from .stacks import asking
from .survival import Moment, Replayer
from .time_limit import TimeLimit
from .trials import Situation, Trials

TRIED = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:16",
    "garbage_collection_threshold:0.8",
)
"""What is tried besides the recorded settings: each remedy of PyTorch's notes on CUDA semantics for
fragmentation, by itself, with common values; the empty text is the defaults."""
_DEVICE = "what was reserved and what the device still had, at the failure"
_REFUSED = "what was reserved at the failure: the device had more, so something else set the limit"


@dataclass(frozen=True, slots=True)
class _Limit:
    num_bytes: int | None
    source: str
    missing_bytes: int | None = None


def replay(
    source: str | Path | Mapping[str, Any],
    *,
    device: int | None = None,
    limit_bytes: int | None = None,
    settings: Sequence[str] = (),
    limits: ReadLimits | None = None,
) -> SnapshotReplay:
    """Explain a memory snapshot, and replay it under other allocator settings; needs no GPU.

    The moment that is described is the last failure, or the peak of allocated memory where nothing
    failed. Nothing in the file is run: classes and functions that it names are refused.

    Args:
        source: a file of ``torch.cuda.memory._dump_snapshot``, as it is, compressed with gzip, as
            JSON, or as a page of ``torch.cuda._memory_viz``; or what ``_snapshot()`` returns.
        device: the index of the device; None takes the one that ran out of memory last, else the
            one with the longest history.
        limit_bytes: what the allocator may hold; None takes what it could hold at the failure.
        settings: texts of PYTORCH_ALLOC_CONF to try besides the usual ones.
        limits: how large a file may be; None takes the usual ones.

    Raises:
        DataError: if the file cannot be read, is no snapshot, or takes too long.
        UsageError: if one of the settings makes no sense.

    Limits:
        What would have happened after the failure is not in a snapshot: surviving means that the
        request that failed would have been served. Memory outside PyTorch's allocator is taken as
        it was at the failure. ``docs/replay.md`` lists what is not modelled.
    """
    limits = limits or ReadLimits()
    parsed = {text: AllocatorSettings.parse(text) for text in (*TRIED, *settings)}
    if isinstance(source, str | Path):
        name, content = str(source), load_content(Path(source), limits)
    else:
        name, content = "the snapshot", source
    time_limit = TimeLimit(name, limits.max_seconds)
    record = read_device(name, content, device, limits)
    return _explained(history_of(record, time_limit), limit_bytes, parsed)


def _explained(
    history: History, limit_bytes: int | None, tried: Mapping[str, AllocatorSettings]
) -> SnapshotReplay:
    record = history.record
    failures = history.failures()
    entry = failures[-1] if failures else peak_entry(history, _start(history)[0])
    start, problem = _start(history)
    reserved_before_bytes = 0 if start is None else start.reserved_bytes
    picture = picture_at(history, start, entry, problem)
    failure = history.entries[entry] if failures else None
    recorded_limit = _limit(record.settings, picture, failure)
    limit = recorded_limit
    if limit_bytes is not None:
        limit = _Limit(limit_bytes, "given", limit.missing_bytes)
    moment = _moment(history, entry, failure, limit)
    releases = releases_of(
        history,
        limit_bytes=recorded_limit.num_bytes,
        reserved_bytes=reserved_before_bytes,
        until=entry,
    )
    trials = None
    if record.entries and not record.is_of_profiler:
        start, problem = _start(history)  # the first one has been followed
        situation = Situation(
            history=history,
            replayer=Replayer(history, start, releases),
            recorded_moment=_moment(history, entry, failure, recorded_limit),
            moment=moment,
            picture=picture,
            num_entries=entry,
            has_start=start is not None,
        )
        trials = Trials(situation)
    return _result(history, picture, moment, limit, (entry, failures, trials, tried))


def _result(
    history: History,
    picture: Picture,
    moment: Moment,
    limit: _Limit,
    found: tuple[int, Sequence[int], Trials | None, Mapping[str, AllocatorSettings]],
) -> SnapshotReplay:
    entry, failures, trials, tried = found
    record, earlier = history.record, history.earlier.values()
    holders = Holders(picture.in_use, history.time_limit)
    has_free = picture.runs is not None and not record.is_of_profiler
    return SnapshotReplay(
        kind="failure" if failures else "peak" if record.entries else "end",
        source=record.source,
        device=record.device,
        num_entries=record.num_entries,
        num_failures=len(failures),
        num_earlier_blocks=len(earlier),
        earlier_bytes=sum(num_bytes for num_bytes, _ in earlier),
        entry=_number(history, entry),
        settings=record.settings_text,
        allocated_bytes=picture.allocated_bytes,
        reserved_bytes=picture.reserved_bytes,
        limit_bytes=limit.num_bytes,
        limit_source=limit.source,
        request=_request(history.entries[entry], limit) if failures else None,
        free=free_memory(picture.runs or (), moment.request_bytes, moment.pool)
        if has_free
        else None,
        by_line=holders.by_line(),
        by_doing=holders.by_doing(),
        by_category=holders.by_category(),
        outcomes=() if trials is None else tuple(trials.outcomes(tried)),
        agreement=None if trials is None else trials.agreement,
        notes=tuple(_notes(history, picture, limit, entry if failures else None)),
    )


def _number(history: History, entry: int) -> int | None:
    """Return the place of an entry among all in the file."""
    entries = history.entries
    if not entries:
        return None
    return entries[entry].number if entry < len(entries) else history.record.num_entries


def _start(history: History) -> tuple[Layout | None, str]:
    """Return the layout before the first entry, or why it is not known."""
    try:
        return history.start(), ""
    except LayoutError as error:
        return None, str(error)


def _limit(settings: AllocatorSettings, picture: Picture, failure: Entry | None) -> _Limit:
    """Tell what the allocator could hold.

    A request is refused when the device has less than the segment that it takes. Where the device
    had more, a memory fraction or something else refused it, and what was held is all that is sure.
    """
    missing_bytes = None
    is_refused_otherwise = False
    if failure is not None:
        needed_bytes = segment_bytes_for(failure.num_bytes, settings.large_segment_bytes)
        is_refused_otherwise = failure.address >= needed_bytes
        # How much an expandable segment had to grow depends on what was free at its end.
        if not is_refused_otherwise and not settings.expandable_segments:
            missing_bytes = needed_bytes - failure.address
    if failure is None:
        return _Limit(None, "not known: nothing failed, and no limit was given")
    if is_refused_otherwise:
        return _Limit(max(picture.peak_reserved_bytes, picture.reserved_bytes), _REFUSED)
    return _Limit(picture.reserved_bytes + failure.address, _DEVICE, missing_bytes)


def _moment(history: History, entry: int, failure: Entry | None, limit: _Limit) -> Moment:
    before = history.events_before
    return Moment(
        num_events=before[entry] if entry < len(before) else len(history.events),
        request_bytes=None if failure is None else failure.num_bytes,
        pool=None if failure is None else failure.pool,
        limit_bytes=limit.num_bytes,
    )


def _request(failure: Entry, limit: _Limit) -> FailedRequest:
    who = asking(failure.frames)
    return FailedRequest(
        num_bytes=failure.num_bytes,
        line=who.line,
        called_from=who.called_from,
        doing=who.doing.value,
        stream=failure.pool.stream,
        is_private=failure.pool.is_private,
        device_free_bytes=failure.address,
        missing_bytes=limit.missing_bytes,
    )


def _notes(history: History, picture: Picture, limit: _Limit, failure: int | None) -> Iterator[str]:
    """Say what is not known, and what was left out."""
    record = history.record
    yield from record.notes
    if record.is_of_profiler:
        yield (
            "Torch's profiler wrote this: it has tensors and no allocator, so nothing is said of "
            "free memory and settings."
        )
        return
    if record.num_devices > 1:
        yield (
            f"{record.num_devices} devices are in it, this is device {record.device}; --device "
            "chooses another."
        )
    if not record.entries:
        yield (
            "It has no history, only the segments: call torch.cuda.memory._record_memory_history() "
            "before what is to be replayed."
        )
    yield from _notes_on_history(history, picture)
    if failure is not None:
        yield from _notes_on_failure(history, picture, limit, failure)


def _notes_on_history(history: History, picture: Picture) -> Iterator[str]:
    if history.entries and history.earlier:
        total = format_bytes(sum(num_bytes for num_bytes, _ in history.earlier.values()))
        yield (
            f"{len(history.earlier):,} blocks ({total}) are from before the first entry: the "
            "history began later, or has forgotten its beginning (max_entries). In which order "
            "they were made is not known, so other settings are tried from two starts."
        )
    if history.num_missing_frees:
        yield (
            f"{history.num_missing_frees:,} blocks were freed without an entry: the history was "
            "paused, or leaves actions out."
        )
    if picture.problem and history.entries:
        yield f"Where blocks lay cannot be followed: {picture.problem}."
    if any(allocation.pool.is_private for allocation in history.allocations):
        yield (
            "Private pools (CUDA graphs, MemPool) are in it. Each is replayed as a pool of its own "
            "that keeps what it has until it was recorded to give it back."
        )


def _notes_on_failure(
    history: History, picture: Picture, limit: _Limit, failure: int
) -> Iterator[str]:
    num_failures = len(history.failures())
    if num_failures > 1:
        yield f"Memory ran out {num_failures} times; the last time is described."
    num_later = sum(each.action == "alloc" for each in history.entries[failure:])
    if num_later:
        yield f"The program went on: {num_later:,} allocations follow the failure."
    yield "What the step would have needed after the failure is not in the snapshot."
    if limit.num_bytes is not None and picture.peak_reserved_bytes > limit.num_bytes:
        yield (
            f"{format_bytes(picture.peak_reserved_bytes)} were reserved before, more than the "
            f"{format_bytes(limit.num_bytes)} there were at the failure: something outside "
            "PyTorch's allocator has grown in between."
        )
