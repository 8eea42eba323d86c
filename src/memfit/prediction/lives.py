"""Tells which blocks live when during a recorded step, with what each of them is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from memfit.allocator.simulate import num_setup_events
from memfit.devices.spec import Device
from memfit.prediction.process_memory import rules_of
from memfit.prediction.recording import StepRecording
from memfit.trace.events import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """Blocks that come and go together and are of one kind: one, or what lasts the whole step.

    They live from event ``begin`` of the step's timeline until right before event ``end``.
    """

    begin: int
    end: int
    num_bytes: int
    num_blocks: int
    category: str
    module: str
    source_line: str


def lives_of(recording: StepRecording, device: Device) -> list[Life]:
    """Return the lives of all blocks of the steady step; alike ones are added up."""
    trace, rules = recording.steady, rules_of(device)
    added: dict[tuple[int, int, str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for index, begin, end in _spans(trace):
        block = trace.allocations[index]
        key = (begin, end, block.category.value, block.module, block.source_line)
        added[key][0] += rules.rounded(block.num_bytes)
        added[key][1] += 1
    return [
        Life(
            begin=begin,
            end=end,
            num_bytes=num_bytes,
            num_blocks=num_blocks,
            category=category,
            module=module,
            source_line=source_line,
        )
        for (begin, end, category, module, source_line), (num_bytes, num_blocks) in added.items()
    ]


def _spans(trace: Trace) -> Iterator[tuple[int, int, int]]:
    """Yield each allocation with its first and its end event, counted as a timeline counts."""
    num_before = num_setup_events(trace)
    last = max(0, len(trace.events) - num_before)
    begins: dict[int, int] = {}
    for position, event in enumerate(trace.events):
        place = max(0, position - num_before + 1)
        if event >= 0:
            begins[event] = place
        else:
            yield -1 - event, begins.pop(-1 - event), place
    for index, begin in begins.items():
        yield index, begin, last + 1
