"""Measures what a step takes: it is really run here, under the allocator's own counters."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Any, Self
from unittest.mock import patch

import torch

from memfit.allocator.simulate import CPU_RULES, peak_bytes
from memfit.devices.catalogue import current_device_name
from memfit.errors import DeviceUnavailableError, RecordingError, UnknownDeviceError
from memfit.figures import Measurement, Timeline
from memfit.job import Job
from memfit.measurement.timing import shortest_step
from memfit.observe.allocator_events import AllocatorEvent, AllocatorWatch
from memfit.prediction.brief_recording import record_briefly
from memfit.prediction.predict import predict
from memfit.prediction.recording import Recording
from memfit.runtime.run import Run, open_plain_session, unguarded_run
from memfit.session.batches import find_layout, real_batch
from memfit.session.borrowing import borrowed_to_run
from memfit.session.evaluation_mode import ModesSeen, evaluation_notes
from memfit.strategies.fact_finding import gather_facts
from memfit.strategies.facts import JobFacts
from memfit.strategies.plan import Plan
from memfit.trace.alignment import align
from memfit.trace.events import Allocation, Category, Phase, category_names

_MARK = "memfit::"
_STEP_MARK = "step"
_MOST_STEPS = 40


@dataclass(frozen=True, slots=True)
class _Steps:
    """The events of one session: everything, and where its steps begin and end."""

    events: Sequence[AllocatorEvent]
    marks: Sequence[tuple[int, str]]


def measure(job: Job, plan: Plan | None = None, device: str = "cpu") -> Measurement:
    """Run two steps of a job here and measure the peak of each, then time a few more.

    A gradient scaler skips the optimizer's first steps until it has found its scale. Then there are
    more, and the second that was not skipped is measured.

    On ``cpu`` every allocation and free since before the model was built is counted, as the
    allocator reports it. On a CUDA device its counters are read.

    Args:
        job: what to run.
        plan: how; None means as it is.
        device: ``cpu`` or ``cuda`` (with an index if wanted).

    Raises:
        DeviceUnavailableError: if the device is not in this machine.
        UsageError: if the plan is for several ranks.
    """
    plan = plan or Plan()
    plan.check_for_one_process("measured")
    if device != "cpu" and not (torch.cuda.is_available() and device.startswith("cuda")):
        raise DeviceUnavailableError(device, _devices_here())
    if device == "cpu":
        return _measure_on_cpu(job, plan)
    return _measure_on_cuda(job, plan, device)


def _measure_on_cpu(job: Job, plan: Plan) -> Measurement:
    recording = _recorded(job, plan)
    gc.collect()
    with borrowed_to_run(job) as borrowed_job:
        with AllocatorWatch() as watch:
            run, batch, facts = _open(borrowed_job, plan, "cpu", recording)
            with ModesSeen(run.model) as modes, SkippedSteps() as skipped:
                for _ in skipped.until_steady():
                    with torch.profiler.record_function(_MARK + _STEP_MARK):
                        run.step(batch)
            with torch.profiler.record_function(_MARK + _STEP_MARK):
                pass
        step_seconds = shortest_step(run, batch)
        run.close()
    steps = _Steps(watch.events(), watch.marks(_MARK))
    begins = [time_ns for time_ns, name in steps.marks if name == _STEP_MARK]
    timeline = _timeline(steps, begins[-2], begins[-1], recording)
    first_peak = _peak_between(steps.events, begins[0], begins[1])
    peak = max(timeline.allocated_bytes, default=0)
    at_peak = timeline.allocated_bytes.index(peak)
    # So far; in kilobytes on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    return Measurement(
        device="cpu",
        batch_size=job.batch_size,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=None,
        process_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        first_step_peak_bytes=first_peak,
        step_seconds=step_seconds,
        by_category={}
        if recording is None
        else {name: part[at_peak] for name, part in timeline.by_category.items()},
        strategies=plan.labels(),
        numerics=str(plan.numerics_for(facts)),
        predicted_peak_bytes=None if recording is None else peak_bytes(recording.steady, CPU_RULES),
        notes=evaluation_notes(modes.found),
        modules_in_evaluation=modes.found,
        timeline=timeline,
    )


def _recorded(job: Job, plan: Plan) -> Recording | None:
    """Record the step as well, where that can be done, to say what was predicted."""
    try:
        return record_briefly(job, plan)
    except RecordingError:
        return None


def _predicted_here(job: Job, plan: Plan) -> int | None:
    """Predict the peak for this machine's GPU, where the catalogue has it and the step records."""
    try:
        return predict(job, current_device_name(), plan).peak_allocated_bytes
    except (RecordingError, UnknownDeviceError):
        return None


def _measure_on_cuda(job: Job, plan: Plan, device: str) -> Measurement:
    predicted_bytes = _predicted_here(job, plan)
    peaks = []
    with borrowed_to_run(job) as borrowed_job:
        run, batch, facts = _open(borrowed_job, plan, device)
        with ModesSeen(run.model) as modes, SkippedSteps() as skipped:
            for _ in skipped.until_steady():
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                run.step(batch)
                torch.cuda.synchronize()
                peaks.append(torch.cuda.max_memory_allocated())
        reserved = torch.cuda.max_memory_reserved()
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        step_seconds = shortest_step(run, batch)
        run.close()
    return Measurement(
        device=torch.cuda.get_device_name(),
        batch_size=job.batch_size,
        peak_allocated_bytes=peaks[-1],
        peak_reserved_bytes=reserved,
        process_bytes=total_bytes - free_bytes,
        first_step_peak_bytes=peaks[0],
        step_seconds=step_seconds,
        by_category={},
        strategies=plan.labels(),
        numerics=str(plan.numerics_for(facts)),
        predicted_peak_bytes=predicted_bytes,
        notes=evaluation_notes(modes.found),
        modules_in_evaluation=modes.found,
    )


def _open(
    job: Job, plan: Plan, device: str, recording: Recording | None = None
) -> tuple[Run, Any, JobFacts]:
    """Build a run without a monitor, which would measure inside the measurement."""
    placed = plan if plan.parallel is None else None  # which one process cannot carry out
    session = open_plain_session(job, device.partition(":")[0], find_layout(job), placed)
    batch = real_batch(job, job.batch_size)
    if device != "cpu":
        batch = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), batch)
    # What was found out about the plan's pieces is not looked for again.
    separation = None if recording is None else recording.facts.separation
    facts = gather_facts(session, separation=separation)
    return unguarded_run(session, plan, phase_listener=_mark_phase), batch, facts


def _mark_phase(phase: Phase) -> None:
    """Leave the beginning of a phase in the profile."""
    with torch.profiler.record_function(_MARK + phase.value):
        pass


def _peak_between(events: Sequence[AllocatorEvent], begin_ns: int, end_ns: int) -> int:
    """Return the highest total between two moments."""
    current = highest = 0
    for event in events:
        if event.time_ns >= end_ns:
            break
        current += event.num_bytes
        if event.time_ns >= begin_ns:
            highest = max(highest, current)
    return highest


def _timeline(steps: _Steps, begin_ns: int, end_ns: int, recording: Recording | None) -> Timeline:
    """Lay the measured events of the steady step out by the recorded blocks' categories."""
    before = [event for event in steps.events if event.time_ns < begin_ns]
    inside = [event for event in steps.events if begin_ns <= event.time_ns < end_ns]
    recorded = [] if recording is None else recording.steady.allocations
    current = _categories_at_start(before, recorded)
    recorded = [block for block in recorded if block.phase is not Phase.SETUP]
    # The marks of phases become positions among the events.
    phases = []
    position = 0
    for time_ns, name in steps.marks:
        if name == _STEP_MARK or not begin_ns <= time_ns < end_ns:
            continue
        while position < len(inside) and inside[position].time_ns < time_ns:
            position += 1
        phases.append((position, name))
    categories = _categories_of(inside, recorded, phases)
    changes = [
        (category.value, event.num_bytes)
        for category, event in zip(categories, inside, strict=True)
    ]
    here = {category.value: num_bytes for category, num_bytes in current.items()}
    return Timeline.of(here, changes, phases)


def _categories_of(
    events: Sequence[AllocatorEvent],
    recorded: Sequence[Allocation],
    phases: Sequence[tuple[int, str]],
) -> list[Category]:
    """Return the category of each event's block.

    Of what forward made, that is a saved activation which backward finds: that is seen here. What
    else a block is for, and what forward does again during backward, the recording tells.
    """
    asked = [event.num_bytes for event in events if event.num_bytes > 0]
    matches = iter(align(asked, recorded))
    categories = [Category.TEMPORARIES] * len(events)
    block_of = list(range(len(events)))
    alive: dict[int, int] = {}
    # Where each forward begins, by where backward follows, as positions among events.
    forwards = {
        end: begin
        for (begin, name), (end, following) in pairwise(phases)
        if (name, following) == (Phase.FORWARD.value, Phase.BACKWARD.value)
    }
    in_forward = {place for end, begin in forwards.items() for place in range(begin, end)}
    for place, event in enumerate(events):
        if event.num_bytes > 0:
            alive[event.address] = place
            block = next(matches)  # what was not recorded is scratch inside a kernel
            category = Category.TEMPORARIES if block is None else block.category
            if category is not Category.SAVED_ACTIVATIONS or place not in in_forward:
                categories[place] = category
        else:
            block_of[place] = alive.pop(event.address, place)
        for made in alive.values() if place + 1 in forwards else ():
            if made >= forwards[place + 1] and categories[made] is Category.TEMPORARIES:
                categories[made] = Category.SAVED_ACTIVATIONS
    return [categories[place] for place in block_of]


def _categories_at_start(
    before: Sequence[AllocatorEvent], recorded: Sequence[Allocation]
) -> dict[Category, int]:
    """Split what lives when the step begins; what the recording does not know is temporary."""
    current = {Category(name): 0 for name in category_names(recorded)}
    for block in recorded:
        if block.phase is Phase.SETUP:
            current[block.category] += block.num_bytes
    total = sum(event.num_bytes for event in before)
    current[Category.TEMPORARIES] += total - sum(current.values())
    return current


def _devices_here() -> str:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return "here: cpu, " + ", ".join(names)


class SkippedSteps:
    """Look on while active, and say how often to step.

    A scaler begins with a large scale and skips the optimizer's step until the gradients fit their
    type. An optimizer that has not stepped has no states, so such a step takes less than later
    ones.
    """

    def __init__(self) -> None:
        self._is_skipped = False
        self._step: Any = torch.amp.GradScaler._maybe_opt_step
        self._patch = patch.object(torch.amp.GradScaler, "_maybe_opt_step", self._noting())

    def __enter__(self) -> Self:
        self._patch.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._patch.stop()

    def until_steady(self) -> Iterator[None]:
        """Yield before each step to take, until two were not skipped, the last one among them."""
        num_taken = 0
        for _ in range(_MOST_STEPS):
            self._is_skipped = False
            yield
            num_taken += not self._is_skipped
            if num_taken == 2:
                return

    def _noting(self) -> Any:
        """Make a step of a scaler that notes whether it is skipped."""

        def note(
            scaler: torch.amp.GradScaler,
            optimizer: torch.optim.Optimizer,
            optimizer_state: dict[str, Any],
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            found = optimizer_state["found_inf_per_device"].values()
            self._is_skipped = any(bool(each.item()) for each in found)
            return self._step(scaler, optimizer, optimizer_state, *args, **kwargs)

        return note
