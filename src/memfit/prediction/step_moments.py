"""Tells what lives where each phase of a recorded step is highest, by its line of code."""

from __future__ import annotations

import linecache
from collections.abc import Sequence

from memfit.devices.spec import Device
from memfit.peak_changes.moments import KnownLine, LineBlocks, Moment, StepMoments
from memfit.prediction.process_memory import rules_of
from memfit.prediction.recording import StepRecording
from memfit.trace.events import Category, Phase, Trace

_MOST_CODE = 160


def step_moments(recording: StepRecording, device: Device) -> StepMoments:
    """Return the highest moment of each phase of the steady step, and the lines it went through."""
    trace, rules = recording.steady, rules_of(device)
    sizes = [rules.rounded(allocation.num_bytes) for allocation in trace.allocations]
    lines = [
        KnownLine(
            source_line=name,
            function=line.function,
            code=linecache.getline(line.path, line.number).strip()[:_MOST_CODE],
        )
        for name, line in recording.history.lines.items()
    ]
    return StepMoments(lines=lines, moments=_moments(trace, sizes))


def _moments(trace: Trace, sizes: Sequence[int]) -> list[Moment]:
    """Find the highest moments and what lives there; the events are gone through twice."""
    highest: dict[Phase, tuple[int, int]] = {}
    current = 0
    for position, event in enumerate(trace.events):
        if event < 0:
            current -= sizes[-1 - event]
            continue
        current += sizes[event]
        phase = trace.allocations[event].phase
        if phase is not Phase.SETUP and current > highest.get(phase, (0, -1))[0]:
            highest[phase] = current, position
    positions = {position: phase for phase, (_, position) in highest.items()}
    alive: dict[int, None] = {}
    found: dict[Phase, Moment] = {}
    for position, event in enumerate(trace.events):
        if event >= 0:
            alive[event] = None
        else:
            del alive[-1 - event]
        if position in positions:
            phase = positions[position]
            line = trace.allocations[event].source_line
            found[phase] = Moment(
                phase=phase.value, source_line=line, blocks=_blocks(trace, sizes, list(alive))
            )
    return [found[phase] for phase in highest]


def _blocks(trace: Trace, sizes: Sequence[int], alive: Sequence[int]) -> list[LineBlocks]:
    """Put blocks of one line, module and category together, largest first.

    Workspaces of libraries belong to no line: whichever asks first makes them for all.
    """
    held: dict[tuple[str, str, str], list[int]] = {}
    for index in alive:
        allocation = trace.allocations[index]
        is_shared = allocation.category is Category.WORKSPACES
        line = "" if is_shared else allocation.source_line
        key = line, allocation.module, allocation.category.value
        if sizes[index]:
            held.setdefault(key, []).append(sizes[index])
    blocks = [
        LineBlocks(
            source_line=line,
            module=module,
            category=category,
            num_bytes=sum(found),
            num_blocks=len(found),
        )
        for (line, module, category), found in held.items()
    ]
    return sorted(blocks, key=lambda block: -block.num_bytes)
