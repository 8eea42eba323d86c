"""Tells what lives at the peak of a recorded step, by the line of code behind it."""

from __future__ import annotations

import linecache
from collections.abc import Mapping

from memfit.allocator.simulate import alive_at_peak, replay
from memfit.devices.spec import Device
from memfit.peak_changes.at_peak import AtPeak, LineBlocks, PeakLine
from memfit.prediction.process_memory import rules_of
from memfit.prediction.recording import StepRecording
from memfit.trace.events import Category, CodeLine

_Held = dict[str, dict[tuple[str, str], list[int]]]
"""By line: bytes of each block, by module and category."""


def lines_at_peak(recording: StepRecording, device: Device) -> AtPeak:
    """Return what lives at the peak of the steady step, the line that holds most first.

    Workspaces of libraries belong to no line: whichever asks first makes them for all.
    """
    trace, rules = recording.steady, rules_of(device)
    held: _Held = {}
    for index, num_bytes in alive_at_peak(trace, rules):
        allocation = trace.allocations[index]
        if num_bytes:
            is_shared = allocation.category is Category.WORKSPACES
            blocks = held.setdefault("" if is_shared else allocation.source_line, {})
            key = allocation.module, allocation.category.value
            blocks.setdefault(key, []).append(num_bytes)
    lines = [_peak_line(line, blocks, recording.history.lines) for line, blocks in held.items()]
    event = trace.events[replay(trace, rules).peak_event] if trace.events else -1
    last = trace.allocations[event] if event >= 0 else None
    return AtPeak(
        phase="" if last is None else last.phase.value,
        source_line="" if last is None else last.source_line,
        lines=sorted(lines, key=lambda line: (-line.num_bytes, line.source_line)),
    )


def _peak_line(
    source_line: str,
    blocks: Mapping[tuple[str, str], list[int]],
    lines: Mapping[str, CodeLine],
) -> PeakLine:
    """Describe a line and what it holds."""
    place = lines.get(source_line)
    return PeakLine(
        source_line=source_line,
        function="" if place is None else place.function,
        code="" if place is None else linecache.getline(place.path, place.number).strip(),
        blocks=[
            LineBlocks(
                module=module, category=category, num_bytes=sum(found), num_blocks=len(found)
            )
            for (module, category), found in blocks.items()
        ],
    )
