"""Predicts what the program of a row read: its step is rebuilt, recorded and replayed.

Nothing here looks at what was measured. What outside the allocator's memory a process holds is
added later, in ``metrics``, because it is fitted on the rows of other models.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from memfit.allocator.settings import AllocatorSettings
from memfit.devices.placement import Placement
from memfit.devices.spec import Device
from memfit.prediction.card_replays import (
    peaks_alone,
    replayed_peaks,
    smallest_reserved_bytes,
)
from memfit.prediction.peak_range import PeakRange
from memfit.prediction.recording import StepRecording, record_steps
from memfit.virtual.process_group import one_rank_of

from .cards import card_of_row
from .protocols import Step
from .read_ahead import drawn_orders, reads_ahead
from .rebuild import Rebuilt, rebuild
from .rows import Row

_REPLAYED = ("allocated", "reserved")
_VERSION = re.compile(r"(\d+)\.(\d+)")
_SETTING_KEYS = (
    "pytorch_alloc_conf",
    "pytorch_cuda_alloc_conf",
    "allocator_settings",
    "allocator_setting",
    "allocator_config",
    "allocator_conf",
    "allocator",
    "alloc_conf",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What is predicted of one row, before anything is known of other rows."""

    device: str
    """The catalogue's name of the card."""
    allocated: PeakRange
    reserved: PeakRange
    smallest_bytes: int | None
    """The least reserved memory with which the step survives; only where a limit was tried."""
    context_bytes: int
    """The catalogue's guess of what lies outside the allocator."""
    card_bytes: int
    seconds: float
    notes: tuple[str, ...]


def predict_row(row: Row) -> Predicted:
    """Predict the peaks that the program of a row read on its card.

    Raises:
        MemfitError: if the row's step cannot be rebuilt or recorded, or its card is unknown.
    """
    started = time.perf_counter()
    device = card_of_row(row)
    settings = settings_of(row)
    rebuilt = rebuild(row)
    recording = _recorded(row, rebuilt, device)
    from_step = rebuilt.measured_from_step
    recording, others = _as_loaded(row, recording, settings, from_step)
    peaks = replayed_peaks(recording, settings, from_step=from_step)
    for reading in rebuilt.readings:
        recorded = _recorded(row, reading, device)
        read = peaks_alone(recorded, settings, from_step=reading.measured_from_step)
        for name, peak, known, found in zip(_REPLAYED, peaks, others, read, strict=True):
            known.extend(_ends(peak, found, name))
    allocated, reserved = (_over_all(*each) for each in zip(peaks, others, strict=True))
    smallest = None
    if has_limit(row):
        smallest = min(smallest_reserved_bytes(recording, settings), reserved.likely_bytes)
    return Predicted(
        device=device.name,
        allocated=allocated,
        reserved=reserved,
        smallest_bytes=smallest,
        context_bytes=int(device.value("context_bytes")),
        card_bytes=row.device_total_bytes or device.memory_bytes,
        seconds=time.perf_counter() - started,
        notes=rebuilt.notes,
    )


def _recorded(row: Row, rebuilt: Rebuilt, device: Device) -> StepRecording:
    """Record what a row is read as, on its rank among those that it names."""
    placement = Placement(device=device.name, num_ranks=row.ranks) if row.ranks > 1 else None
    with one_rank_of(placement):
        return record_steps(
            _with_prelude(rebuilt),
            device,
            num_steps=rebuilt.num_steps,
            torch_version=torch_version_of(row),
        )


def _as_loaded(
    row: Row, recording: StepRecording, settings: AllocatorSettings, from_step: int
) -> tuple[StepRecording, tuple[list[int], list[int]]]:
    """Return a recording as its weights were likely loaded, and the peaks of all drawn orders.

    Likely is the order in the middle of what the orders reserve.
    """
    if not reads_ahead(row):
        return recording, ([], [])
    drawn: list[tuple[int, int, int, StepRecording]] = []
    for number, history in enumerate(drawn_orders(recording.history)):
        order = replace(recording, history=history)
        allocated, reserved = peaks_alone(order, settings, from_step=from_step)
        drawn.append((reserved, allocated, number, order))
    drawn.sort(key=lambda each: each[:3])
    likely = drawn[len(drawn) // 2][3]
    return likely, ([each[1] for each in drawn], [each[0] for each in drawn])


def _ends(peak: PeakRange, read_bytes: int, name: str) -> tuple[int, int]:
    """Return the interval of another reading: each would be as far off as the likely one."""
    alone = replace(peak, likely_bytes=read_bytes, low_bytes=read_bytes, high_bytes=read_bytes)
    interval = alone.interval(name)
    return interval.low_bytes, interval.high_bytes


def _over_all(peak: PeakRange, others: Sequence[int]) -> PeakRange:
    """Widen a peak's range to those of other orders and readings."""
    return replace(
        peak,
        low_bytes=min([peak.low_bytes, *others]),
        high_bytes=max([peak.high_bytes, *others]),
    )


def has_limit(row: Row) -> bool:
    """Return whether a row tells how a run inside a limit ended: a failed one, or tried caps."""
    return row.outcome == "oom" or bool(row.measured_extra.get("cap_tests"))


def torch_version_of(row: Row) -> tuple[int, int] | None:
    """Return the major and minor version of a row's torch; None where it is not recorded."""
    match = _VERSION.match(row.torch_version or "")
    return (int(match[1]), int(match[2])) if match else None


def settings_of(row: Row) -> AllocatorSettings:
    """Get the settings under which a row's allocator ran, its defaults where nothing is recorded.

    Raises:
        UsageError: if the recorded settings cannot be read.
    """
    extra = {key.lower(): value for key, value in row.measured_extra.items()}
    for key in _SETTING_KEYS:
        if extra.get(key):
            return AllocatorSettings.parse(_as_text(extra[key]))
    is_expandable = extra.get("expandable_segments") is True
    return AllocatorSettings(expandable_segments=is_expandable)


def _as_text(value: object) -> str:
    """Write settings the way the environment variable holds them."""
    if isinstance(value, Mapping):
        return ",".join(f"{key}:{each}" for key, each in value.items())
    return str(value)


def _with_prelude(rebuilt: Rebuilt) -> Callable[[], Step]:
    """Put what the process did before in front of the row's own setup."""

    def setup() -> Step:
        for happened_before in rebuilt.prelude:
            happened_before()
        return rebuilt.setup()

    return setup
