"""Says what would change a prediction, as data: each piece of advice comes from a computation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from memfit.allocator.settings import AllocatorSettings
from memfit.allocator.simulate import alive_at_peak, replay
from memfit.devices.device_file import is_own_file
from memfit.devices.spec import CUDA, Device
from memfit.figures import Advice, Certainty, Holder, Prediction, Topic
from memfit.prediction.card_replays import CardReplays
from memfit.prediction.largest_batch import PredictedJob, largest_micro_batch
from memfit.prediction.predict import holder_of
from memfit.prediction.process_memory import card_memory, rules_of
from memfit.prediction.recording import StepRecording
from memfit.trace.events import Category, Phase, Trace

_LEAST_SHARE = 0.02
"""What is less than this part of the figure it belongs to is not worth a line."""
_DOMINANT_SHARE = 0.5
_CHEAP_SECONDS = 3.0
_BY_ROWS = "_coalesce"
"""What optimizers begin with where a gradient is sparse."""


_RANKS = {Topic.MICRO_BATCH: 0, Topic.GUESSED_TERM: 2, Topic.BYTES_PER_SAMPLE: 3}
"""Where a topic stands among others; those between save bytes, up to as many as they name."""


def advise(
    recording: StepRecording,
    prediction: Prediction,
    device: Device,
    settings: AllocatorSettings,
    job: PredictedJob | None = None,
) -> tuple[Advice, ...]:
    """Return what would change a prediction.

    Replays the recording, and records a job a few more times where its recording was quick.

    Args:
        recording: what the prediction was made from.
        prediction: of one step.
        device: that the recording was made for.
        settings: of the allocator.
        job: the job, where it was one that was recorded.
    """
    found = [
        _expandable_segments(recording, prediction, device, settings),
        _optimizer_temporaries(recording, device),
        _saved_activations(prediction),
        *_guessed_terms(prediction, device),
    ]
    if job is not None and recording.record_seconds < _CHEAP_SECONDS:
        found += [_bytes_per_sample(job), _fitting_micro_batch(job)]
    return in_order(advice for advice in found if advice is not None)


def in_order(found: Iterable[Advice]) -> tuple[Advice, ...]:
    """Put first what makes the step fit, then what is worth most bytes, last what saves none."""
    return tuple(sorted(found, key=lambda each: (_RANKS.get(each.topic, 1), -each.num_bytes)))


def largest_holders(recording: StepRecording, device: Device, limit: int) -> tuple[Holder, ...]:
    """Return the largest blocks that live at the peak of the steady step, largest first."""
    trace = recording.steady
    blocks = sorted(alive_at_peak(trace, rules_of(device)), key=lambda block: -block[1])
    return tuple(
        holder_of(num_bytes, trace.allocations[index]) for index, num_bytes in blocks[:limit]
    )


def _expandable_segments(
    recording: StepRecording, prediction: Prediction, device: Device, settings: AllocatorSettings
) -> Advice | None:
    """Replay the same recording with segments that grow."""
    if device.platform != CUDA or settings.expandable_segments:
        return None
    growing = replace(settings, expandable_segments=True)
    memory = card_memory(CardReplays(recording, growing), device, in_full=False)
    saved = prediction.peak_reserved_bytes - memory.peak_reserved_bytes
    return _worth(Topic.EXPANDABLE_SEGMENTS, saved, prediction.peak_reserved_bytes)


def _optimizer_temporaries(recording: StepRecording, device: Device) -> Advice | None:
    """Tell what the optimizer's temporaries add to the peak, where the peak lies in its step."""
    trace, rules = recording.steady, rules_of(device)
    outcome, phases = replay(trace, rules), _phases(trace)
    if not phases or phases[outcome.peak_event] is not Phase.OPTIMIZER:
        return None
    if any(operation.name == _BY_ROWS for operation in trace.operations):
        return None  # updates of sparse gradients have no other implementation
    temporaries = sum(
        num_bytes
        for index, num_bytes in alive_at_peak(trace, rules)
        if trace.allocations[index].category is Category.TEMPORARIES
        and trace.allocations[index].phase is Phase.OPTIMIZER
    )
    total = elsewhere = 0
    for phase, (index, delta) in zip(phases, trace.deltas(), strict=True):
        num_bytes = rules.rounded(trace.allocations[index].num_bytes)
        total += num_bytes if delta >= 0 else -num_bytes
        if phase is not Phase.OPTIMIZER:
            elsewhere = max(elsewhere, total)
    peak = outcome.peak_allocated_bytes
    return _worth(Topic.OPTIMIZER_TEMPORARIES, min(temporaries, peak - elsewhere), peak)


def _phases(trace: Trace) -> list[Phase]:
    """Return the phase of every event: that of the last block made by then."""
    phase, phases = Phase.SETUP, []
    for event in trace.events:
        phase = trace.allocations[event].phase if event >= 0 else phase
        phases.append(phase)
    return phases


def _saved_activations(prediction: Prediction) -> Advice | None:
    held = prediction.by_category.get(Category.SAVED_ACTIVATIONS.value, 0)
    if held < _DOMINANT_SHARE * prediction.peak_allocated_bytes:
        return None
    return _worth(Topic.SAVED_ACTIVATIONS, held, prediction.peak_allocated_bytes)


def _guessed_terms(prediction: Prediction, device: Device) -> Iterator[Advice | None]:
    """Name what a calibration would replace."""
    if device.platform != CUDA or is_own_file(device.name):
        return
    for term in prediction.terms:
        if term.certainty is Certainty.GUESS:
            yield _worth(Topic.GUESSED_TERM, term.num_bytes, prediction.process_bytes, term.name)


def _bytes_per_sample(job: PredictedJob) -> Advice | None:
    """Compare with half of the batch."""
    half = job.job.batch_size // 2
    if job.plan.splitting is not None or half < 1:
        return None
    peak = job.prediction.peak_allocated_bytes
    less = peak - job.with_batch_size(half).peak_allocated_bytes
    if less < _LEAST_SHARE * peak:
        return None
    per_sample = less // (job.job.batch_size - half)
    return Advice(
        topic=Topic.BYTES_PER_SAMPLE, num_bytes=per_sample, part_fraction=per_sample / peak
    )


def _fitting_micro_batch(job: PredictedJob) -> Advice | None:
    """Name the micro-batch with which a step fits that does not fit whole."""
    if job.prediction.fits is not False:
        return None
    found = largest_micro_batch(job).micro_batch_size
    if found is None:
        return None
    return Advice(topic=Topic.MICRO_BATCH, num_bytes=0, part_fraction=0.0, subject=str(found))


def _worth(topic: Topic, num_bytes: int, whole_bytes: int, subject: str = "") -> Advice | None:
    """Return the advice if it concerns a part worth mentioning."""
    if num_bytes <= 0 or num_bytes < _LEAST_SHARE * whole_bytes:
        return None
    return Advice(
        topic=topic, num_bytes=num_bytes, part_fraction=num_bytes / whole_bytes, subject=subject
    )
