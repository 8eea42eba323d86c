"""Predicts what a step takes: it is recorded on fake tensors, as planned, and replayed."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from memfit.allocator.simulate import (
    CPU_RULES,
    CUDA_RULES,
    AllocatorRules,
    Replay,
    num_setup_events,
    peak_bytes,
    phase_starts,
    replay,
)
from memfit.cost.roofline import step_seconds
from memfit.devices.catalogue import load_device
from memfit.devices.spec import CUDA, Device
from memfit.errors import RecordingError
from memfit.figures import Certainty, Holder, Prediction, Term, Timeline
from memfit.job import Job
from memfit.losses.chunking import noted_losses
from memfit.runtime.run import Run, open_plain_session
from memfit.session.batches import BatchLayout, find_layout, shapes_of
from memfit.session.facts import JobFacts, gather_facts
from memfit.strategies.plan import Plan, worst_numerics
from memfit.trace.events import Category, Trace
from memfit.trace.recorder import Recorder
from memfit.trace.virtual import ValuesNeededError, as_virtual, virtual_tensors
from memfit.units import MIB

_INTERPRETER_BYTES = 320 * MIB
_SEGMENT_BYTES = 2 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A job's first and second step under a plan, recorded without running them."""

    first: Trace
    steady: Trace
    facts: JobFacts
    record_seconds: float


def record(job: Job, plan: Plan | None = None, layout: BatchLayout | None = None) -> Recording:
    """Record two steps of a job under a plan on fake tensors.

    The second step is the steady one: optimizer states exist by then.

    Raises:
        RecordingError: if the step needs the values of tensors, or an operator has no fake version.
        StrategyError: if a strategy of the plan cannot apply.
    """
    started = time.perf_counter()
    plan = plan or Plan()
    layout = layout or find_layout(job)
    try:
        traces, facts = _record_steps(job, plan, layout, disguised=True)
    except ValuesNeededError:
        # Code that looks at its batch may have a path for fake tensors that does not.
        traces, facts = _record_steps(job, plan, layout, disguised=False)
    return Recording(
        first=traces[0],
        steady=traces[1],
        facts=facts,
        record_seconds=time.perf_counter() - started,
    )


def _record_steps(
    job: Job, plan: Plan, layout: BatchLayout, *, disguised: bool
) -> tuple[list[Trace], JobFacts]:
    """Record two steps, and gather the job's facts."""
    batch_shapes = shapes_of(job, job.batch_size)
    with virtual_tensors(disguised=disguised) as mode, noted_losses() as losses:
        batch = as_virtual(mode, batch_shapes)
        session = open_plain_session(job, "cpu", layout)
        recorder = Recorder(lambda: session.owned_tensors(batch))
        with recorder:
            recorder.name_modules(session.model)
            run = Run(session, plan, phase_listener=recorder.enter_phase)
            traces = []
            for _ in range(2):
                recorder.begin_step()
                run.step(batch)
                traces.append(recorder.end_step())
        candidates = max((loss.num_candidates for loss in losses), default=0)
        run.close()
        return traces, gather_facts(session, candidates)


def predict(job: Job, device: str = "cpu", plan: Plan | None = None) -> Prediction:
    """Predict peak memory and time of one steady step of a job on a device.

    Nothing is run and no GPU is needed. On ``cpu`` allocated bytes are what the allocator will
    report. For GPUs the CPU's operators are used for now, and every figure is marked as a guess.

    Args:
        job: what would be trained.
        device: a name from ``memfit devices``.
        plan: how it would be carried out; None means as it is.

    Raises:
        UnknownDeviceError: if the catalogue has no such device.
        RecordingError: if the step cannot be recorded.
    """
    spec = load_device(device)
    return evaluate(job, record(job, plan), spec, plan or Plan())


def evaluate(
    job: Job,
    recording: Recording,
    device: Device,
    plan: Plan,
    *,
    budget_bytes: int | None = None,
    budget_of: str | None = None,
) -> Prediction:
    """Turn a recording into a prediction for one device."""
    rules = rules_of(device)
    outcome = replay(recording.steady, rules)
    peak = outcome.peak_allocated_bytes
    reserved = peak if device.kind != CUDA else -(-peak // _SEGMENT_BYTES) * _SEGMENT_BYTES
    terms = _terms(device, peak, reserved)
    prediction = Prediction(
        device=device.name,
        batch_size=job.batch_size,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=reserved,
        process_bytes=sum(term.num_bytes for term in terms),
        first_step_peak_bytes=peak_bytes(recording.first, rules),
        step_seconds=step_seconds(recording.steady, device),
        by_category=outcome.by_category,
        by_module=outcome.by_module,
        strategies=plan.labels(),
        numerics=str(worst_numerics(plan.strategies, recording.facts)),
        certainty=Certainty.GUESS if device.kind == CUDA else Certainty.EXACT,
        terms=terms,
        largest=_holders(outcome),
        num_flops=recording.steady.flops(),
        record_seconds=recording.record_seconds,
        timeline=timeline_of(recording.steady, rules),
    )
    return judge(prediction, device, budget_bytes, budget_of)


def judge(
    prediction: Prediction, device: Device, budget_bytes: int | None, budget_of: str | None
) -> Prediction:
    """Hold a prediction against a budget; the device's own memory is its default budget."""
    budget_of = budget_of or default_budget_of(device)
    budget_bytes = budget_bytes or device.memory_bytes or None
    fits = None if budget_bytes is None else prediction.bounded_bytes(budget_of) <= budget_bytes
    return replace(prediction, budget_bytes=budget_bytes, budget_of=budget_of, fits=fits)


def default_budget_of(device: Device) -> str:
    """Say which figure a budget bounds unless told otherwise."""
    return "process" if device.kind == CUDA else "allocated"


def rules_of(device: Device) -> AllocatorRules:
    """Give the allocator rules of a device."""
    return CUDA_RULES if device.kind == CUDA else CPU_RULES


def timeline_of(trace: Trace, rules: AllocatorRules) -> Timeline:
    """Give allocated bytes by category, when the step begins and after each of its events."""
    num_before = num_setup_events(trace)
    current = dict.fromkeys(Category, 0)
    parts: dict[str, list[int]] = {category.value: [] for category in Category}
    for position, (index, delta) in enumerate(trace.deltas(), start=1):
        sign = 1 if delta >= 0 else -1
        allocation = trace.allocations[index]
        current[allocation.category] += sign * rules.rounded(allocation.num_bytes)
        if position >= num_before:
            for category, num_bytes in current.items():
                parts[category.value].append(num_bytes)
    totals = [sum(column) for column in zip(*parts.values(), strict=True)]
    phases = [(max(0, begin - num_before), name) for begin, name in phase_starts(trace)]
    return Timeline(allocated_bytes=totals, by_category=parts, phases=phases)


def _terms(device: Device, peak: int, reserved: int) -> tuple[Term, ...]:
    """Split process bytes into terms, each marked with how it is known."""
    if device.kind != CUDA:
        source = "resident size of a Python process that has imported torch, typical"
        return (
            Term(
                name="recorded step",
                num_bytes=peak,
                certainty=Certainty.EXACT,
                source="replay of the recorded step",
            ),
            Term(
                name="interpreter and libraries",
                num_bytes=_INTERPRETER_BYTES,
                certainty=Certainty.GUESS,
                source=source,
            ),
        )
    context = device.facts["context_bytes"]
    return (
        Term(
            name="recorded step",
            num_bytes=peak,
            certainty=Certainty.GUESS,
            source="replay of the step with the CPU's operators, blocks rounded to 512 bytes",
        ),
        Term(
            name="allocator's unused segments",
            num_bytes=reserved - peak,
            certainty=Certainty.GUESS,
            source="rounded up to 2 MiB segments, fragmentation not simulated",
        ),
        Term(
            name="CUDA context",
            num_bytes=int(context.value),
            certainty=Certainty(context.certainty),
            source=context.source,
        ),
    )


def _holders(outcome: Replay) -> tuple[Holder, ...]:
    return tuple(
        Holder(
            num_bytes=num_bytes,
            category=allocation.category.value,
            module=allocation.module,
            operator=allocation.operator,
        )
        for num_bytes, allocation in outcome.largest
    )


__all__ = ["Recording", "RecordingError", "evaluate", "predict", "record"]
