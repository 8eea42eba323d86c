"""Turns the plain data of a snapshot into records, whichever version of torch has written it.

Source of the format: the docstring of ``torch.cuda.memory._snapshot`` (torch 2.13),
torch/csrc/cuda/Module.cpp (THCPModule_memorySnapshot), memory_snapshot.cpp, and, for older ones,
``_block_extra_legacy`` of torch/cuda/_memory_viz.py. What differs from version to version: blocks
had no ``address`` and a ``history`` with ``real_size`` instead of ``requested_size`` and ``frames``
(up to 2.1), segments had no ``segment_pool_id`` and ``is_expandable``, entries no ``pool_id``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from memfit.allocator.blocks import SMALL_SEGMENT_BYTES
from memfit.allocator.settings import AllocatorSettings
from memfit.errors import DataError, UsageError
from memfit.units import MIB, TIB, format_bytes

from .files import ReadLimits
from .records import COMMON, BlockRecord, DeviceRecord, Entry, OwnerId, PoolKey, SegmentRecord

_IN_USE = frozenset({"active_allocated", "active_pending_free", "active_awaiting_free"})
_STATES = _IN_USE | {"inactive"}
_LARGEST_BYTES = 8 * TIB
"""More than any card has; a larger size is no size."""
_LARGEST_ADDRESS = 1 << 64
_MOST_DEVICES = 16
_SEGMENT_ACTIONS = frozenset({"segment_alloc", "segment_free", "segment_map", "segment_unmap"})
_ACTIONS = _SEGMENT_ACTIONS | {"alloc", "free_completed", "oom"}
"""Those that say something of memory: ``free_requested`` frees nothing yet, ``snapshot`` and what
users define (``user_defined``) mark a place."""

Content = Mapping[str, Any]
_MOST_CHARACTERS = 2000
_NO_COLLECTION = (
    "garbage_collection_threshold is recorded. It acts only where a memory fraction was set as "
    "well, which a snapshot does not say; the replay is without both."
)


class _MalformedError(ValueError):
    """Say what in a snapshot is not as it should be."""


def read_device(
    source: str, content: Content, device: int | None, limits: ReadLimits
) -> DeviceRecord:
    """Read one device of a snapshot.

    Args:
        source: where it is from, for messages.
        content: the snapshot as plain data.
        device: the index of the device; None takes the one that ran out of memory last, else the
            one with the longest history, else the one with the most reserved memory.
        limits: how large it may be.

    Raises:
        DataError: if it is no snapshot, or the device is not in it.
        UsageError: if the recorded settings cannot be modelled.
    """
    try:
        traces = _lists(content.get("device_traces", []), "device_traces")
        raw_segments = _dictionaries(content.get("segments", []), "segments")
        if "segments" not in content and "device_traces" not in content:
            names = ", ".join(sorted(str(name)[:40] for name in content)[:8])
            raise _MalformedError(f"it has neither segments nor device_traces, but: {names}")
        if sum(map(len, traces)) > _MOST_DEVICES * limits.max_entries:
            # One list may be named a million times in a small file.
            raise _MalformedError("its histories have more entries than all cards of a machine")
        found = {index for index, trace in enumerate(traces) if trace}
        present = sorted(found | {_device_of(segment) for segment in raw_segments})
        if device is None:
            device = _chosen(traces, raw_segments, present)
        elif device not in present:
            there = ", ".join(map(str, present)) or "none"
            raise _MalformedError(f"device {device} is not in it; there: {there}. Give another")
        return _read(source, content, device, (traces, raw_segments, len(present)), limits)
    except _MalformedError as error:
        raise DataError(
            source,
            f"not a memory snapshot that can be read: {error}. torch.cuda.memory._dump_snapshot "
            "writes one.",
        ) from None


def _read(
    source: str,
    content: Content,
    device: int,
    parts: tuple[list[list[Any]], list[Content], int],
    limits: ReadLimits,
) -> DeviceRecord:
    traces, raw_segments, num_devices = parts
    trace = traces[device] if device < len(traces) else []
    if len(trace) > limits.max_entries:
        raise _MalformedError(
            f"its history has {len(trace):,} entries, and at most "
            f"{limits.max_entries:,} are replayed; record fewer with max_entries"
        )
    own = [each for each in raw_segments if _device_of(each) == device]
    is_of_profiler = bool(own or trace) and not any("segment_type" in each for each in own)
    is_of_profiler &= any("category" in entry for entry in trace if isinstance(entry, dict))
    segments = tuple(_segments(own, limits))
    settings, text, notes = _read_settings(source, content.get("allocator_settings"))
    owners = _PrivateRanges(segments)
    entries = tuple(_entries(trace, owners))
    return DeviceRecord(
        source=source,
        device=device,
        num_devices=num_devices,
        settings=settings,
        settings_text=text,
        entries=entries,
        num_entries=len(trace),
        segments=segments,
        is_of_profiler=is_of_profiler,
        notes=notes,
    )


def _chosen(
    traces: Sequence[Sequence[Any]], segments: Sequence[Content], present: Sequence[int]
) -> int:
    reserved_bytes: dict[int, int] = {}
    for segment in segments:
        owner, num_bytes = _device_of(segment), _number(segment, "total_size", "a segment")
        reserved_bytes[owner] = reserved_bytes.get(owner, 0) + num_bytes

    def weight(device: int) -> tuple[bool, int, int]:
        trace = traces[device] if device < len(traces) else []
        failed = any(isinstance(each, dict) and each.get("action") == "oom" for each in trace)
        return failed, len(trace), reserved_bytes.get(device, 0)

    return max(present, key=weight, default=0)


def _segments(raw: Sequence[Content], limits: ReadLimits) -> Iterator[SegmentRecord]:
    seen_to = -1
    num_blocks = 0
    for segment in sorted(raw, key=lambda each: _number(each, "address", "a segment")):
        address = _number(segment, "address", "a segment")
        num_bytes = _size(segment, "total_size", "a segment")
        if address < seen_to:
            raise _MalformedError(f"two segments share the address {address:#x}")
        seen_to = address + num_bytes
        blocks = _dictionaries(segment.get("blocks", []), "blocks of a segment")
        num_blocks += len(blocks)
        if num_blocks > limits.max_blocks:
            raise _MalformedError(f"it has more than {limits.max_blocks:,} blocks")
        kind = segment.get("segment_type")
        is_expandable = bool(segment.get("is_expandable", False))
        yield SegmentRecord(
            address=address,
            num_bytes=num_bytes,
            pool=PoolKey(
                _number(segment, "stream", "a segment", 0), _owner(segment.get("segment_pool_id"))
            ),
            is_small=num_bytes == SMALL_SEGMENT_BYTES if kind is None else kind == "small",
            is_expandable=is_expandable,
            blocks=tuple(_blocks(address, num_bytes, blocks)),
        )


def _blocks(address: int, num_bytes: int, raw: Sequence[Content]) -> Iterator[BlockRecord]:
    """Yield the blocks of a segment; those of old snapshots lie one behind the other."""
    position, end = address, address + num_bytes
    for block in raw:
        begin = _number(block, "address", "a block", position)
        size = _size(block, "size", "a block")
        state = block.get("state")
        if not isinstance(state, str) or state not in _STATES:
            raise _MalformedError(f"a block is {_shown(state)}, which is no state of one")
        if begin < position or begin + size > end:
            raise _MalformedError(f"a block at {begin:#x} does not lie in its segment")
        position = begin + size
        requested, frames = _requested(block, size)
        yield BlockRecord(
            address=begin,
            num_bytes=size,
            requested_bytes=requested,
            in_use=state in _IN_USE,
            frames=frames,
        )


def _requested(block: Content, num_bytes: int) -> tuple[int, Sequence[Any]]:
    """Return what was asked for and from where; in old snapshots it is in the block's history."""
    history = block.get("history")
    if "frames" not in block and isinstance(history, list) and history:
        latest = history[0] if isinstance(history[0], dict) else {}
        real = latest.get("real_size", num_bytes)
        return min(num_bytes, real if isinstance(real, int) else num_bytes), _frames(latest)
    requested = _number(block, "requested_size", "a block", num_bytes)
    return min(requested or num_bytes, num_bytes), _frames(block)


def _entries(trace: Sequence[Any], owners: _PrivateRanges) -> Iterator[Entry]:
    pools: dict[tuple[int, OwnerId], PoolKey] = {}
    for number, raw in enumerate(trace):
        if not isinstance(raw, dict):
            raise _MalformedError(f"entry {number:,} of the history is {_shown(raw)}")
        action = raw.get("action")
        if not isinstance(action, str):
            raise _MalformedError(f"entry {number:,} of the history has no action")
        if action not in _ACTIONS:
            continue
        where = f"entry {number:,} ({action})"
        address = _number(raw, "device_free" if action == "oom" else "addr", where)
        owner = _owner(raw["pool_id"]) if "pool_id" in raw else owners.owner(address, action)
        key = (_number(raw, "stream", where, 0), owner)
        category = raw.get("category", "")
        yield Entry(
            action,
            address,
            _size(raw, "size", where),
            pools.setdefault(key, PoolKey(*key)),
            _frames(raw),
            category if isinstance(category, str) else "",
            number,
        )


class _PrivateRanges:
    """Tells which private pool an address is in, for histories that do not say it themselves."""

    def __init__(self, segments: Sequence[SegmentRecord]) -> None:
        private = [each for each in segments if each.pool.is_private]
        self._starts = [each.address for each in private]
        self._segments = private

    def owner(self, address: int, action: str) -> OwnerId:
        """Return the pool that holds an address in the end."""
        index = bisect_right(self._starts, address) - 1
        if index < 0 or action == "oom":
            return COMMON
        segment = self._segments[index]
        return segment.pool.owner if address < segment.address + segment.num_bytes else COMMON


def _device_of(segment: Content) -> int:
    return _number(segment, "device", "a segment", 0)


def _owner(value: object) -> OwnerId:
    """Read the identity of a pool, a pair of numbers (a list in JSON)."""
    if value is None:
        return COMMON
    if isinstance(value, list | tuple) and len(value) == 2:
        first, second = value
        if isinstance(first, int) and isinstance(second, int):
            return int(first), int(second)
    raise _MalformedError(f"a pool is {_shown(value)}; needed is a pair of numbers")


def _frames(holder: Content) -> Sequence[Any]:
    frames = holder.get("frames")
    return frames if isinstance(frames, list) else ()


def _number(holder: Content, name: str, where: str, default: int | None = None) -> int:
    value = holder.get(name, default)
    if value is None and default is not None:
        return default
    if type(value) is not int or not -1 <= value < _LARGEST_ADDRESS:
        raise _MalformedError(f"{name} of {where} is {_shown(value)}; needed is a number")
    return value


def _size(holder: Content, name: str, where: str) -> int:
    num_bytes = _number(holder, name, where)
    if not 0 <= num_bytes <= _LARGEST_BYTES:
        raise _MalformedError(
            f"{name} of {where} is {format_bytes(num_bytes)}: no card has so much"
        )
    return num_bytes


def _lists(value: object, name: str) -> list[list[Any]]:
    if not isinstance(value, list) or not all(isinstance(each, list) for each in value):
        raise _MalformedError(f"{name} is {_shown(value)}; needed is a list of lists")
    return value


def _dictionaries(value: object, name: str) -> list[Content]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise _MalformedError(f"{name} is {_shown(value)}; needed is a list of dictionaries")
    return value


def _shown(value: object) -> str:
    """Write a value from a file in a few characters, however large it is."""
    if isinstance(value, str):
        return repr(value[:40])
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if abs(value) < _LARGEST_ADDRESS else "a number of more than 64 bits"
    return f"a {type(value).__name__}"


def _read_settings(source: str, recorded: object) -> tuple[AllocatorSettings, str, tuple[str, ...]]:
    """Return the settings, their text, and notes on what could not be taken over.

    The text is taken from the key that ends in ``ALLOC_CONF`` (PYTORCH_CUDA_ALLOC_CONF; other
    backends have names of their own). Without a text the parts are taken, and before torch 2.1
    there is neither: then the defaults are assumed, which a note says. A memory fraction is left
    out: the limit is known from the failure itself.

    Raises:
        DataError: if the parts are no settings, or the text names another backend.
    """
    if recorded is None:
        note = "The snapshot does not say the allocator's settings; the defaults are assumed."
        return AllocatorSettings(), "", (note,)
    if not isinstance(recorded, Mapping):
        raise DataError(source, f"its allocator_settings are a {type(recorded).__name__}")
    text = next(
        (value for key, value in recorded.items() if str(key).endswith("ALLOC_CONF") and value), ""
    )
    if not isinstance(text, str) or len(text) > _MOST_CHARACTERS:
        raise DataError(
            source, "its allocator_settings hold something else than a text of settings"
        )
    notes: tuple[str, ...] = ()
    try:
        settings = AllocatorSettings.parse(text) if text else _of_parts_or_refused(source, recorded)
    except UsageError as error:
        if "backend" in text:
            raise DataError(source, str(error)) from None
        settings = _of_parts_or_refused(source, recorded)
        notes = (f"The recorded settings {text[:200]!r} are known in part: {error}",)
    text = text or _settings_text(settings)
    if settings.garbage_collection_threshold:
        notes += (_NO_COLLECTION,)
    plain = replace(settings, per_process_memory_fraction=None, garbage_collection_threshold=0.0)
    return plain, text, notes


def _of_parts_or_refused(source: str, recorded: Mapping[str, Any]) -> AllocatorSettings:
    try:
        return _of_parts(recorded)
    except (TypeError, ValueError, AttributeError, OverflowError, UsageError) as error:
        reason = f"its allocator_settings make no sense ({str(error)[:200]})"
        raise DataError(source, reason) from None


def _of_parts(recorded: Mapping[str, Any]) -> AllocatorSettings:
    max_split_bytes = int(recorded.get("max_split_size", -1))
    divisions = dict(recorded.get("roundup_power2_divisions") or {})
    return AllocatorSettings(
        expandable_segments=bool(recorded.get("expandable_segments", False)),
        # Without a limit it is recorded as -1, or as the largest number there is.
        max_split_size_bytes=max_split_bytes if 0 < max_split_bytes < 2**62 else None,
        garbage_collection_threshold=float(recorded.get("garbage_collection_threshold") or 0.0),
        roundup_power2_divisions={
            int(start) * MIB: int(count) for start, count in divisions.items() if count
        },
    )


def _settings_text(settings: AllocatorSettings) -> str:
    """Write settings as PYTORCH_ALLOC_CONF says them; empty for the defaults."""
    parts = []
    if settings.expandable_segments:
        parts.append("expandable_segments:True")
    if settings.max_split_size_bytes is not None:
        parts.append(f"max_split_size_mb:{settings.max_split_size_bytes // MIB}")
    if settings.garbage_collection_threshold:
        parts.append(f"garbage_collection_threshold:{settings.garbage_collection_threshold:g}")
    divisions = settings.roundup_power2_divisions
    if isinstance(divisions, Mapping):
        if any(divisions.values()):
            pairs = (
                f"{start // MIB}:{count}" for start, count in sorted(divisions.items()) if count
            )
            parts.append(f"roundup_power2_divisions:[{','.join(pairs)}]")
    elif divisions > 1:
        parts.append(f"roundup_power2_divisions:{divisions}")
    return ",".join(parts)
