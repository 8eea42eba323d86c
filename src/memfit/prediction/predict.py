"""Predicts what a step takes: it is recorded on fake tensors, as planned, and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from memfit.allocator.settings import AllocatorSettings
from memfit.allocator.simulate import CPU_RULES, replay
from memfit.cost.operator_times import OperatorTimes
from memfit.devices.catalogue import load_device
from memfit.devices.placement import Placement
from memfit.devices.spec import CUDA, Device
from memfit.errors import MemfitError, UsageError
from memfit.figures import BOUNDED_FIGURES, Certainty, Holder, Prediction
from memfit.job import Job
from memfit.prediction.brief_recording import record_briefly
from memfit.prediction.budget import MemoryBudget
from memfit.prediction.card_replays import CardReplays, timeline_of
from memfit.prediction.process_memory import card_memory, host_memory, platform_notes
from memfit.prediction.recording import (
    Recording,
    StepRecording,
    record,
    record_steps,
    recorded_otherwise,
)
from memfit.prediction.waiting import hooks_seconds, waited_seconds
from memfit.prediction.ways import turned, widened
from memfit.strategies.base import Numerics
from memfit.strategies.data_parallel import share_of
from memfit.strategies.plan import Plan
from memfit.trace.events import Allocation
from memfit.virtual.process_group import current_placement, one_rank_of


def predict(
    job: Job,
    device: str = "cpu",
    plan: Plan | None = None,
    *,
    allocator: str | None = None,
    ranks: int | None = None,
    rank: int = 0,
    placement: Placement | None = None,
) -> Prediction:
    """Predict peak memory and time of one steady step of a job on a device, or on one of several.

    Nothing is run and no GPU is needed. On ``cpu`` allocated bytes are what the allocator will
    report. For a GPU the step is recorded on a virtual card and replayed through a simulation of
    the caching allocator. Of several ranks one is recorded, without the others: the job's functions
    shard or wrap the model themselves, in the process group that is open while they are called.

    Args:
        job: what would be trained. Of several ranks each has such a batch of its own, unless the
            plan says how they share the model: then they share the batch as well.
        device: a name from ``memfit devices``.
        plan: how it would be run; None means as it is.
        allocator: the text of ``PYTORCH_ALLOC_CONF`` under which it would run.
        ranks: how many train together, each on such a device; None means that no process group is
            opened.
        rank: the one that is looked at.
        placement: the same with the device and more, instead.

    Raises:
        UnknownDeviceError: if the catalogue has no such device.
        RecordingError: if the step cannot be recorded.
        UsageError: if the allocator's settings or the ranks make no sense.
    """
    place = placement_of(device, ranks, rank, placement)
    if plan is not None and plan.parallel is not None:
        place = place or placement_of(device, plan.ranks, rank)
    with one_rank_of(place):
        job = part_under(plan, job)
        return _predict_here(job, device if place is None else place.device, plan, allocator)


def part_under(plan: Plan | None, job: Job) -> Job:
    """Return what the rank whose process group is open gets of a job under a plan.

    Raises:
        UsageError: if the plan is for several ranks, and nobody said how many there are.
    """
    if plan is None or plan.parallel is None:
        return job
    place = current_placement()
    if place is None or place.num_ranks < 2:
        raise UsageError(
            f"{plan.parallel.label()} is for several ranks. Say for how many: ranks=N, or --ranks "
            "N."
        )
    return share_of(job, place.num_ranks, place.rank)


def placement_of(
    device: str, ranks: int | None, rank: int, placement: Placement | None = None
) -> Placement | None:
    """Return the placement that is asked for; None where no process group is to be opened.

    Raises:
        UsageError: if there is no such rank.
    """
    if placement is not None:
        return placement
    if ranks is None:
        if rank:
            raise UsageError(f"Rank {rank} is one of how many? Say ranks=N as well.")
        return None
    return Placement(device=device, num_ranks=ranks, rank=rank)


def _predict_here(job: Job, device: str, plan: Plan | None, allocator: str | None) -> Prediction:
    """Predict in the process group that is open, if any is."""
    spec = load_device(device)
    settings = None if allocator is None else AllocatorSettings.parse(allocator)
    recording = record_briefly(job, plan, device=spec)
    notes = effect_notes(recording)

    def judge(recorded: Recording) -> Prediction:
        return evaluate(
            job, recorded, spec, plan or Plan(), settings=settings, in_full=True, notes=notes
        )

    again = partial(record, job, plan, device=spec, facts=recording.facts)
    return with_other_spread(judge(recording), recording, again, judge)


def with_other_spread(
    found: Prediction,
    recording: Recording,
    again: Callable[..., Recording],
    judge: Callable[[Recording], Prediction],
) -> Prediction:
    """Return a prediction whose intervals reach to what other answers give.

    Choices are spread unevenly where a size rests on them. Single values that code may branch on,
    as loops do that end by one, are answered otherwise, one line at a time. Nothing is done where
    nothing was answered.

    Args:
        found: the prediction.
        recording: what the prediction was made of.
        again: records the same job under the same plan, in the ``way`` that it is given.
        judge: turns the other recording into a prediction with the same budget and settings.
    """
    for answer, other in recorded_otherwise(recording, again):
        judged = judge(other)
        found = widened(found, judged) if answer is None else turned(found, judged, answer)
    return found


def wants_effects(recording: Recording) -> bool:
    """Return whether notes say what the step changes besides gradients."""
    return not recording.is_long and current_placement() is None


def effect_notes(recording: Recording) -> Sequence[str]:
    """Return what the step changes besides gradients, parameters and optimizer states.

    Steps that take seconds to record are not looked into, nor are those of one rank of several.
    """
    separation = recording.facts.separation
    if separation is None or not wants_effects(recording):
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
    ranks: int | None = None,
    rank: int = 0,
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
        ranks: how many train together; None leaves process groups to the code.
        rank: the one that is looked at.

    Raises:
        UnknownDeviceError: if the catalogue has no such device.
        RecordingError: if the step cannot be recorded.
        UsageError: if there is no such rank.
    """
    spec = load_device(device)
    settings = AllocatorSettings.parse(allocator or "")
    with one_rank_of(placement_of(device, ranks, rank)):
        recording = record_steps(setup, spec, num_steps=num_steps, torch_version=torch_version)
        return evaluate_steps(recording, spec, settings=settings, in_full=True)


def evaluate_steps(
    recording: StepRecording,
    device: Device,
    *,
    budget: MemoryBudget | None = None,
    settings: AllocatorSettings | None = None,
    in_full: bool = False,
    replays: CardReplays | None = None,
) -> Prediction:
    """Turn a recording of any code into a prediction for the device it was made for.

    It is a guess where the size of a tensor rests on an answer.
    """
    seconds = OperatorTimes(device=device).step_seconds(recording.steady)
    step = _PricedStep(step_seconds=seconds, replays=replays)
    found = _predicted(recording, device, step, budget, settings=settings, in_full=in_full)
    return replace(found, certainty=Certainty.GUESS) if recording.decides_sizes else found


def evaluate(
    job: Job,
    recording: Recording,
    device: Device,
    plan: Plan,
    *,
    budget: MemoryBudget | None = None,
    settings: AllocatorSettings | None = None,
    times: OperatorTimes | None = None,
    in_full: bool = False,
    notes: Sequence[str] = (),
    replays: CardReplays | None = None,
) -> Prediction:
    """Turn a recording into a prediction for the device it was made for.

    ``times`` are how long operators take, the roofline's if left out. ``in_full`` looks for the
    smallest memory as well, which takes more replays. ``replays`` are those that another card has
    with this recording.
    """
    confs = (strategy.allocator_conf for strategy in plan.strategies)
    settings = settings or AllocatorSettings.parse(next(filter(None, confs), ""))
    times = times or OperatorTimes(device=device)
    step_seconds = times.step_seconds(recording.steady) + waited_seconds(recording, device, times)
    step = _PricedStep(
        step_seconds=step_seconds + hooks_seconds(recording, device, plan, times),
        host_bytes=recording.spill.peak_host_bytes,
        disk_bytes=recording.spill.peak_disk_bytes,
        batch_size=job.batch_size,
        strategies=plan.labels(),
        numerics=plan.numerics_for(recording.facts),
        notes=notes,
        replays=replays,
    )
    return _predicted(recording, device, step, budget, settings=settings, in_full=in_full)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PricedStep:
    """What is known of a step besides its memory on the device."""

    step_seconds: float
    replays: CardReplays | None = None
    host_bytes: int = 0
    disk_bytes: int = 0
    batch_size: int | None = None
    strategies: Sequence[str] = ()
    numerics: Numerics = Numerics.EXACT
    notes: Sequence[str] = ()


def _predicted(
    recording: StepRecording,
    device: Device,
    step: _PricedStep,
    budget: MemoryBudget | None,
    *,
    settings: AllocatorSettings | None,
    in_full: bool,
) -> Prediction:
    """Put together what the recorded step takes on the device, and hold it against a budget."""
    if device.kind == CUDA:
        replays = step.replays or CardReplays(recording, settings or AllocatorSettings())
        memory = card_memory(replays, device, in_full=in_full)
        peak, timeline = replays.steady_peak, replays.timeline
    else:
        memory = host_memory(recording)
        peak, timeline = replay(memory.steady, CPU_RULES), timeline_of(memory.steady, CPU_RULES)
    budget = (budget or MemoryBudget()).on(device)
    assert budget.of is not None, "a device fills it in"
    placement = current_placement() or Placement()
    bounded_bytes = getattr(memory, BOUNDED_FIGURES[budget.of])
    return Prediction(
        device=device.name,
        ranks=placement.num_ranks,
        rank=placement.rank,
        batch_size=step.batch_size,
        peak_allocated_bytes=memory.peak_allocated_bytes,
        peak_reserved_bytes=memory.peak_reserved_bytes,
        process_bytes=memory.process_bytes,
        first_step_peak_bytes=memory.first_step_peak_bytes,
        step_seconds=step.step_seconds,
        by_category=peak.by_category,
        by_module=peak.by_module,
        strategies=step.strategies,
        numerics=str(step.numerics),
        certainty=memory.certainty,
        terms=memory.terms,
        intervals=memory.intervals,
        fragmentation_fraction=memory.fragmentation_fraction,
        smallest_memory_bytes=memory.smallest_memory_bytes,
        largest=tuple(holder_of(*block) for block in peak.largest),
        host_bytes=step.host_bytes,
        disk_bytes=step.disk_bytes,
        budget_bytes=budget.num_bytes,
        budget_of=budget.of,
        fits=budget.holds(bounded_bytes, step.host_bytes, step.disk_bytes),
        num_flops=memory.steady.flops(),
        record_seconds=recording.record_seconds,
        notes=[*platform_notes(device, memory.steady), *recording.notes, *step.notes],
        modules_in_evaluation=tuple(recording.modules_in_evaluation),
        answers=tuple(recording.answers),
        timeline=timeline,
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
