"""Predicts what a step takes: it is recorded on fake tensors, as planned, and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from memfit.allocator.settings import AllocatorSettings
from memfit.allocator.simulate import (
    CPU_RULES,
    CUDA_RULES,
    AllocatorRules,
    num_setup_events,
    peak_bytes,
    phase_starts,
    replay,
)
from memfit.cost.operator_times import OperatorTimes
from memfit.devices.catalogue import load_device
from memfit.devices.spec import CUDA, Device
from memfit.errors import MemfitError
from memfit.figures import Certainty, Holder, Prediction, Term, Timeline
from memfit.job import Job
from memfit.prediction.process_memory import CardMemory, card_memory
from memfit.prediction.recording import Recording, StepRecording, record, record_steps
from memfit.prediction.waiting import waited_seconds
from memfit.session.evaluation_mode import evaluation_notes
from memfit.strategies.allocator_settings import AllocatorConf
from memfit.strategies.base import Numerics
from memfit.strategies.plan import Plan, worst_numerics
from memfit.trace.events import Allocation, Category, Trace
from memfit.units import MIB

_INTERPRETER_BYTES = 320 * MIB
_GUESSED_SHARE = 0.02
"""A prediction is called a guess when more than this share of it is guessed."""


def predict(
    job: Job, device: str = "cpu", plan: Plan | None = None, *, allocator: str | None = None
) -> Prediction:
    """Predict peak memory and time of one steady step of a job on a device.

    Nothing is run and no GPU is needed. On ``cpu`` allocated bytes are what the allocator will
    report. For a GPU the step is recorded on a virtual card and replayed through a simulation of
    the caching allocator.

    Args:
        job: what would be trained.
        device: a name from ``memfit devices``.
        plan: how it would be run; None means as it is.
        allocator: the text of ``PYTORCH_ALLOC_CONF`` under which it would run.

    Raises:
        UnknownDeviceError: if the catalogue has no such device.
        RecordingError: if the step cannot be recorded.
        UsageError: if the allocator's settings cannot be read.
    """
    spec = load_device(device)
    settings = None if allocator is None else AllocatorSettings.parse(allocator)
    recording = record(job, plan, device=spec)
    found = evaluate(job, recording, spec, plan or Plan(), settings=settings, in_full=True)
    return replace(found, notes=(*found.notes, *effect_notes(recording)))


def effect_notes(recording: Recording) -> Sequence[str]:
    """Return what the step changes besides gradients, parameters and optimizer states.

    Steps that take seconds to record are not looked into.
    """
    separation = recording.facts.separation
    if separation is None or recording.is_long:
        return ()
    try:
        return separation.effects().notes()
    except MemfitError as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        return (f"What else the step changes could not be found out ({reason})",)


def predict_step(
    setup: Callable[[], Callable[[], object]],
    device: str = "cpu",
    *,
    num_steps: int = 2,
    torch_version: tuple[int, int] | None = None,
    allocator: str | None = None,
) -> Prediction:
    """Predict what any training code takes; the last of its steps is the one described.

    The code is recorded as it is: literal ``cuda`` devices mean the virtual card, and whatever its
    names keep alive is counted.

    Args:
        setup: builds everything and gives a function that does one step.
        device: a name from ``memfit devices``.
        num_steps: how often the step is done; the first ones make optimizer states.
        torch_version: whose CUDA rules hold; None means the installed torch's.
        allocator: the text of ``PYTORCH_ALLOC_CONF`` under which it would run.

    Raises:
        UnknownDeviceError: if the catalogue has no such device.
        RecordingError: if the step cannot be recorded.
    """
    spec = load_device(device)
    settings = AllocatorSettings.parse(allocator or "")
    recording = record_steps(setup, spec, num_steps=num_steps, torch_version=torch_version)
    return evaluate_steps(recording, spec, settings=settings, in_full=True)


def evaluate_steps(
    recording: StepRecording,
    device: Device,
    *,
    budget_bytes: int | None = None,
    budget_of: str | None = None,
    settings: AllocatorSettings | None = None,
    in_full: bool = False,
) -> Prediction:
    """Turn a recording of any code into a prediction for the device it was made for."""
    described = _described(recording, device, settings or AllocatorSettings(), in_full=in_full)
    return judge(described, device, budget_bytes, budget_of)


def evaluate(
    job: Job,
    recording: Recording,
    device: Device,
    plan: Plan,
    *,
    budget_bytes: int | None = None,
    budget_of: str | None = None,
    settings: AllocatorSettings | None = None,
    times: OperatorTimes | None = None,
    in_full: bool = False,
) -> Prediction:
    """Turn a recording into a prediction for the device it was made for.

    ``times`` are how long operators take, the roofline's if left out. ``in_full`` looks for the
    smallest memory as well, which takes more replays.
    """
    settings = settings or _settings_of(plan)
    times = times or OperatorTimes(device=device)
    computed_seconds = times.step_seconds(recording.steady)
    prediction = replace(
        _described(recording, device, settings, in_full=in_full),
        step_seconds=computed_seconds + waited_seconds(recording, device, times),
        host_bytes=recording.spill.peak_host_bytes,
        disk_bytes=recording.spill.peak_disk_bytes,
        batch_size=job.batch_size,
        strategies=plan.labels(),
        numerics=str(worst_numerics(plan.strategies, recording.facts)),
        notes=evaluation_notes(recording.facts.modules_in_evaluation),
    )
    return judge(prediction, device, budget_bytes, budget_of)


def _settings_of(plan: Plan) -> AllocatorSettings:
    """Return the allocator's settings that a plan asks for, or the usual ones."""
    confs = (s.conf for s in plan.strategies if isinstance(s, AllocatorConf))
    return AllocatorSettings.parse(next(confs, ""))


def _described(
    recording: StepRecording, device: Device, settings: AllocatorSettings, *, in_full: bool
) -> Prediction:
    """Return what the recorded step takes on the device."""
    rules = rules_of(device)
    steady = recording.steady
    outcome = replay(steady, rules)
    prediction = Prediction(
        device=device.name,
        batch_size=None,
        peak_allocated_bytes=outcome.peak_allocated_bytes,
        peak_reserved_bytes=outcome.peak_allocated_bytes,
        process_bytes=0,
        first_step_peak_bytes=peak_bytes(recording.first, rules),
        step_seconds=OperatorTimes(device=device).step_seconds(steady),
        by_category=outcome.by_category,
        by_module=outcome.by_module,
        strategies=(),
        numerics=str(Numerics.EXACT),
        certainty=Certainty.EXACT,
        largest=tuple(holder_of(*block) for block in outcome.largest),
        num_flops=steady.flops(),
        record_seconds=recording.record_seconds,
        timeline=timeline_of(steady, rules),
    )
    if device.kind == CUDA:
        return _on_card(prediction, card_memory(recording, device, settings, in_full=in_full))
    terms = _cpu_terms(outcome.peak_allocated_bytes)
    return replace(prediction, terms=terms, process_bytes=_total(terms))


def _on_card(prediction: Prediction, card: CardMemory) -> Prediction:
    """Put in what the caching allocator and the libraries make of the recorded bytes."""
    inside = card.terms[:-1]  # the last one is the context, which the allocator does not see
    guessed_bytes = sum(t.num_bytes for t in inside if t.certainty is Certainty.GUESS)
    is_guess = guessed_bytes > _GUESSED_SHARE * _total(inside)
    return replace(
        prediction,
        peak_allocated_bytes=card.peak_allocated_bytes,
        peak_reserved_bytes=card.peak_reserved_bytes,
        process_bytes=_total(card.terms),
        first_step_peak_bytes=card.first_step_peak_bytes,
        terms=card.terms,
        intervals=card.intervals,
        fragmentation_fraction=card.fragmentation_fraction,
        smallest_memory_bytes=card.smallest_memory_bytes,
        certainty=Certainty.GUESS if is_guess else Certainty.TABLE,
    )


def _total(terms: tuple[Term, ...]) -> int:
    return sum(term.num_bytes for term in terms)


def judge(
    prediction: Prediction, device: Device, budget_bytes: int | None, budget_of: str | None
) -> Prediction:
    """Hold a prediction against a budget; the device's own memory is its default budget."""
    budget_of = budget_of or default_budget_of(device)
    budget_bytes = budget_bytes or device.memory_bytes or None
    fits = None if budget_bytes is None else prediction.bounded_bytes(budget_of) <= budget_bytes
    return replace(prediction, budget_bytes=budget_bytes, budget_of=budget_of, fits=fits)


def default_budget_of(device: Device) -> str:
    """Return which figure a budget bounds unless told otherwise."""
    return "process" if device.kind == CUDA else "allocated"


def rules_of(device: Device) -> AllocatorRules:
    """Return the allocator rules of a device."""
    return CUDA_RULES if device.kind == CUDA else CPU_RULES


def timeline_of(trace: Trace, rules: AllocatorRules) -> Timeline:
    """Return allocated bytes by category, when the step begins and after each of its events."""
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


def _cpu_terms(peak: int) -> tuple[Term, ...]:
    """Split the process bytes on a CPU into terms."""
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
            source="resident size of a Python process that has imported torch, typical",
        ),
    )


def holder_of(num_bytes: int, allocation: Allocation) -> Holder:
    """Describe a block that lives at the peak."""
    return Holder(
        num_bytes=num_bytes,
        category=allocation.category.value,
        module=allocation.module,
        operator=allocation.operator,
        source_line=allocation.source_line,
        phase=allocation.phase.value,
    )
