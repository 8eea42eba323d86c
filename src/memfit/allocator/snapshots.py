"""Reads memory snapshots of PyTorch and replays them, to check the simulated allocator.

``torch.cuda.memory._dump_snapshot(path)`` writes them; the format is in the docstring of
``torch.cuda.memory._snapshot``. The replay has been tested on snapshots written by hand in that
format, without a GPU; none recorded by a real one has been replayed yet.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from memfit.allocator.blocks import Block
from memfit.allocator.caching import CachingAllocator
from memfit.allocator.settings import AllocatorSettings
from memfit.errors import DataError
from memfit.units import MIB

_GROWING = {"segment_alloc", "segment_map"}
_SHRINKING = {"segment_free", "segment_unmap"}
_ALIVE = {"active_allocated", "active_pending_free", "active_awaiting_free"}
_CONF_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCall:
    """One recorded change of the reserved memory."""

    before_event: int
    """The position in the snapshot's events before which it happened."""
    action: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The trace of one device, as events and sizes."""

    source: str
    settings: AllocatorSettings
    events: Sequence[int]
    """As in ``Trace.events``. A block is freed where PyTorch could use it again
    (``free_completed``), which is later than the user's free if a second stream used it."""
    sizes: Sequence[int]
    """Requested bytes by allocation."""
    streams: Sequence[int]
    """The stream of each allocation."""
    num_earlier: int
    """Allocations from before the trace, which are the first events: known from a free without an
    allocation, or from a block in use that the trace never names. Their order is by address."""
    device_calls: Sequence[DeviceCall]
    earlier_reserved_bytes: int
    """Reserved before the trace begins."""
    num_failures: int
    """Recorded out-of-memory errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotCheck:
    """What the simulated allocator asked of the device, next to what was recorded."""

    recorded_segments_bytes: Sequence[int]
    """Sizes of the segments (or mappings of expandable ones) in the trace, in order."""
    simulated_segments_bytes: Sequence[int]
    recorded_peak_reserved_bytes: int
    simulated_peak_reserved_bytes: int
    recorded_end_reserved_bytes: int
    simulated_end_reserved_bytes: int
    num_earlier: int
    """Above 0 the comparison starts from a guess: how the earlier blocks lay in their segments."""

    @property
    def agrees(self) -> bool:
        """Return whether segments, peak and end are all equal."""
        return (
            list(self.recorded_segments_bytes) == list(self.simulated_segments_bytes)
            and self.recorded_peak_reserved_bytes == self.simulated_peak_reserved_bytes
            and self.recorded_end_reserved_bytes == self.simulated_end_reserved_bytes
        )

    @property
    def first_difference(self) -> int | None:
        """Return the index of the first segment that differs or is missing; None if all agree."""
        recorded, simulated = self.recorded_segments_bytes, self.simulated_segments_bytes
        for index, (one, other) in enumerate(zip(recorded, simulated, strict=False)):
            if one != other:
                return index
        shorter = min(len(recorded), len(simulated))
        return None if len(recorded) == len(simulated) else shorter


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles containers, texts and numbers, and refuses whatever names a class or function."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        msg = f"it names {module_name}.{global_name}, which no snapshot needs"
        raise pickle.UnpicklingError(msg)


def read_snapshot(source: str | Path | Mapping[str, Any], device: int | None = None) -> Snapshot:
    """Read a memory snapshot from a pickle file or from the mapping that it holds.

    The file is read with an unpickler that admits built-in containers and scalars alone, so that
    a file from elsewhere can run nothing.

    Args:
        source: a path, or what ``torch.cuda.memory._snapshot()`` returns.
        device: the index of the device; None takes the first one with a trace.

    Raises:
        DataError: if the file cannot be read, or is no snapshot.
        UsageError: if the recorded settings cannot be modelled.
    """
    name = str(source) if isinstance(source, str | Path) else "the snapshot"
    content = _load(Path(source)) if isinstance(source, str | Path) else source
    try:
        traces = content["device_traces"]
        if device is None:
            device = next((index for index, trace in enumerate(traces) if trace), 0)
        trace = traces[device] if traces else []
        segments = [each for each in content["segments"] if each.get("device", 0) == device]
        reader = _TraceReader()
        for entry in trace:
            reader.read(entry)
        settings = _settings(content.get("allocator_settings") or {})
        return reader.finish(name, settings, segments)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise DataError(
            name,
            f"not a memory snapshot ({type(error).__name__}: {error}); needed is a dictionary with "
            "segments and device_traces. torch.cuda.memory._dump_snapshot writes one.",
        ) from None


def _load(path: Path) -> Mapping[str, Any]:
    """Unpickle a file without running anything in it."""
    try:
        with path.open("rb") as file:
            content = _PlainUnpickler(file).load()
    except FileNotFoundError:
        raise DataError(str(path), "there is no such file; give a snapshot's path") from None
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError) as error:
        raise DataError(
            str(path),
            f"cannot be read as a memory snapshot: {error}. Needed is the pickle file that "
            "torch.cuda.memory._dump_snapshot writes.",
        ) from None
    if not isinstance(content, Mapping):
        found = type(content).__name__
        raise DataError(str(path), f"holds a {found}; a memory snapshot is a dictionary")
    return content


def _settings(recorded: Mapping[str, Any]) -> AllocatorSettings:
    """Return the settings that a snapshot names; those that need a capacity are left out."""
    text = next((recorded[name] for name in _CONF_NAMES if recorded.get(name)), "")
    if text:
        settings = AllocatorSettings.parse(text)
    else:
        max_split_bytes = recorded.get("max_split_size", -1)
        divisions = recorded.get("roundup_power2_divisions") or {}
        settings = AllocatorSettings(
            expandable_segments=bool(recorded.get("expandable_segments", False)),
            max_split_size_bytes=max_split_bytes if max_split_bytes > 0 else None,
            roundup_power2_divisions={
                int(start) * MIB: count for start, count in divisions.items() if count
            },
        )
    return replace(settings, per_process_memory_fraction=None, garbage_collection_threshold=0.0)


@dataclass(slots=True)
class _TraceReader:
    """Turns the entries of one device's trace into events, in order."""

    sizes: list[int] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    earlier: list[tuple[int, int]] = field(default_factory=list)
    """Address and index of the allocations from before the trace."""
    calls: list[tuple[int, str, int]] = field(default_factory=list)
    num_failures: int = 0
    _alive: dict[int, int] = field(default_factory=dict)

    def read(self, entry: Mapping[str, Any]) -> None:
        """Read the next entry; actions that change no memory are passed over."""
        action = entry["action"]
        if action == "alloc":
            index = self._add(entry["size"], entry["stream"])
            self._alive[entry["addr"]] = index
            self.events.append(index)
        elif action == "free_completed":
            known = self._alive.pop(entry["addr"], None)
            if known is None:
                known = self._add_earlier(entry["addr"], entry["size"], entry["stream"])
            self.events.append(-1 - known)
        elif action in _GROWING or action in _SHRINKING:
            self.calls.append((len(self.events), action, entry["size"]))
        elif action == "oom":
            self.num_failures += 1

    def finish(
        self, source: str, settings: AllocatorSettings, segments: Sequence[Mapping[str, Any]]
    ) -> Snapshot:
        """Add what the final segments tell of earlier allocations, and put those first."""
        for segment in segments:
            address = segment["address"]
            for block in segment["blocks"]:
                address = block.get("address", address)
                if block["state"] in _ALIVE and address not in self._alive:
                    num_bytes = block.get("requested_size", block["size"])
                    self._add_earlier(address, num_bytes, segment.get("stream", 0))
                address += block["size"]
        first = [index for _, index in sorted(self.earlier)]
        change = sum(
            num_bytes if action in _GROWING else -num_bytes for _, action, num_bytes in self.calls
        )
        return Snapshot(
            source=source,
            settings=settings,
            events=tuple(first + self.events),
            sizes=tuple(self.sizes),
            streams=tuple(self.streams),
            num_earlier=len(first),
            device_calls=tuple(
                DeviceCall(before_event=position + len(first), action=action, num_bytes=num_bytes)
                for position, action, num_bytes in self.calls
            ),
            earlier_reserved_bytes=sum(each["total_size"] for each in segments) - change,
            num_failures=self.num_failures,
        )

    def _add(self, num_bytes: int, stream: int) -> int:
        self.sizes.append(num_bytes)
        self.streams.append(stream)
        return len(self.sizes) - 1

    def _add_earlier(self, address: int, num_bytes: int, stream: int) -> int:
        index = self._add(num_bytes, stream)
        self.earlier.append((address, index))
        return index


def check_snapshot(snapshot: Snapshot) -> SnapshotCheck:
    """Replay a snapshot and compare what is asked of the device with what was recorded.

    The device is taken as endless. Where memory was recorded as given back, all cached memory is:
    that is what ``empty_cache`` and a retry after exhausted memory do; garbage collection and
    ``max_split_size`` give back less, and a snapshot made with them may disagree for that reason.
    """
    allocator = CachingAllocator(snapshot.settings)
    releases = {call.before_event for call in snapshot.device_calls if call.action in _SHRINKING}
    alive: dict[int, Block] = {}
    for event in snapshot.events[: snapshot.num_earlier]:
        _replay(snapshot, allocator, alive, event)
    allocator.reset_peaks()
    num_earlier_calls = len(allocator.device.log)
    for position in range(snapshot.num_earlier, len(snapshot.events)):
        if position in releases:
            allocator.empty_cache()
        _replay(snapshot, allocator, alive, snapshot.events[position])
    if len(snapshot.events) in releases:
        allocator.empty_cache()
    calls = allocator.device.log[num_earlier_calls:]
    recorded_peak_bytes, recorded_end_bytes = _recorded_peak_and_end(snapshot)
    return SnapshotCheck(
        recorded_segments_bytes=tuple(
            call.num_bytes for call in snapshot.device_calls if call.action in _GROWING
        ),
        simulated_segments_bytes=tuple(
            num_bytes for action, num_bytes in calls if action in _GROWING
        ),
        recorded_peak_reserved_bytes=recorded_peak_bytes,
        simulated_peak_reserved_bytes=allocator.peak_reserved_bytes,
        recorded_end_reserved_bytes=recorded_end_bytes,
        simulated_end_reserved_bytes=allocator.reserved_bytes,
        num_earlier=snapshot.num_earlier,
    )


def _replay(
    snapshot: Snapshot, allocator: CachingAllocator, alive: dict[int, Block], event: int
) -> None:
    """Run one event."""
    if event < 0:
        allocator.free(alive.pop(-1 - event))
    else:
        alive[event] = allocator.allocate(snapshot.sizes[event], snapshot.streams[event])


def _recorded_peak_and_end(snapshot: Snapshot) -> tuple[int, int]:
    """Follow the recorded calls: the peak and the end of the reserved memory."""
    current = peak = snapshot.earlier_reserved_bytes
    for call in snapshot.device_calls:
        current += call.num_bytes if call.action in _GROWING else -call.num_bytes
        peak = max(peak, current)
    return peak, current
