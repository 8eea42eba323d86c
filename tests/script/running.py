"""Records a script in this process, and runs it for real under the allocator's own events."""

from __future__ import annotations

import bisect
import runpy
import sys
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import torch

from memfit.devices.catalogue import load_device
from memfit.observe.allocator_events import AllocatorWatch
from memfit.script.outside import Outside
from memfit.script.question import ScriptQuestion, ScriptRecording, ScriptTarget, Workplace
from memfit.script.recorded_run import record_run
from memfit.script.steps import EnoughRecordedError, StepCounter

_MARK = "script:"


def recorded(script: Path, *arguments: str, device: str = "cpu", **question) -> ScriptRecording:
    """Record a script in this process: files are diverted, compiled code is not held back."""
    place = Workplace(folder=script.parent / "workplace")
    place.written.mkdir(parents=True, exist_ok=True)
    place.temporary.mkdir(exist_ok=True)
    attribute = question.pop("attribute", "")
    target = ScriptTarget(name=str(script), arguments=arguments, attribute=attribute)
    asked = ScriptQuestion(target=target, device=load_device(device), **question)
    return record_run(asked, place, Outside())


class _Marks:
    """Mark in a profile where phases begin and end."""

    def __init__(self):
        self.number = 0

    def position(self):
        self.number += 1
        with torch.autograd.profiler.record_function(f"{_MARK}{self.number}"):
            return self.number

    def host_peak_bytes(self):
        return 0

    def begin_step(self):
        pass

    def end_step(self):
        pass


def measured(script: Path, *arguments: str, num_steps: int = 3) -> list[tuple[str, int]]:
    """Run a script for real; return each phase and its peak, as the CPU allocator reports it."""
    counter = StepCounter(_Marks(), num_steps, 300.0)
    argv = patch.object(sys, "argv", [str(script), *arguments])
    with AllocatorWatch() as watch, counter, argv, suppress(EnoughRecordedError):
        runpy.run_path(str(script), run_name="__main__")
    at = {0: 0} | {int(name): time_ns for time_ns, name in watch.marks(_MARK)}
    times, totals = [], [0]
    for event in watch.events():
        times.append(event.time_ns)
        totals.append(totals[-1] + event.num_bytes)
    found = []
    for span in counter.spans:
        first, last = (
            bisect.bisect_left(times, at[each]) for each in (span.first_event, span.last_event)
        )
        found.append((span.phase, max(totals[first : last + 1])))
    return found


def predicted(found: ScriptRecording) -> list[tuple[str, int]]:
    """Return each phase of a recording made for the CPU, and its peak."""
    current, totals = 0, [0]
    for _, delta in found.recording.history.deltas():
        current += delta
        totals.append(current)
    return [
        (span.phase, max(totals[span.first_event : span.last_event + 1])) for span in found.spans
    ]
