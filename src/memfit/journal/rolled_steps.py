"""Rolls up the steps of a long run: one record for several that follow each other.

A run of a week has millions of steps, and no picture has as many points. What is kept of several
steps is what is asked of them: how many they were, how long they took, and their highest peaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from .records import StepRecord

MOST_RECORDS = 5000
"""Of a journal; a picture as wide as a screen has 2,000 points."""
_MOST_AFTERWARDS = 3 * MOST_RECORDS // 4


def rolled_up(steps: Iterable[StepRecord]) -> list[StepRecord]:
    """Return at most three quarters of ``MOST_RECORDS``, each of as many steps but for the last.

    >>> steps = [StepRecord(step=n, time_seconds=n, step_seconds=1.0) for n in range(1, 20_001)]
    >>> rolled = rolled_up(steps)
    >>> len(rolled), rolled[-1].first_step, rolled[-1].step
    (2500, 19993, 20000)
    """
    kept = latest(steps)
    num_steps, width = sum(step.num_steps for step in kept), 1
    while width * MOST_RECORDS < 2 * num_steps:
        width *= 2
    rolled = _joined(kept, width)
    while len(rolled) > _MOST_AFTERWARDS:  # where what was continued left odd numbers of steps
        width *= 2
        rolled = _joined(rolled, width)
    return rolled


def latest(steps: Iterable[StepRecord]) -> list[StepRecord]:
    """Keep what was done last of steps done twice: a run that was continued counts on from there.

    A run that went on from a checkpoint repeats the steps since; one that began anew in the same
    folder repeats all of them.
    """
    kept: list[StepRecord] = []
    for record in steps:
        while kept and kept[-1].first_step >= record.first_step:
            kept.pop()
        if kept and kept[-1].step >= record.first_step:  # a part of what was rolled up
            before = record.first_step - 1
            num_steps = before + 1 - kept[-1].first_step
            kept[-1] = replace(kept[-1], step=before, num_steps=num_steps)
        kept.append(record)
    return kept


def _joined(steps: Iterable[StepRecord], width: int) -> list[StepRecord]:
    joined: list[StepRecord] = []
    group: list[StepRecord] = []
    num_steps = 0
    for step in steps:
        if group and num_steps + step.num_steps > width:
            joined.append(_one_of(group))
            group, num_steps = [], 0
        group.append(step)
        num_steps += step.num_steps
    return [*joined, _one_of(group)] if group else joined


def _one_of(group: list[StepRecord]) -> StepRecord:
    """Return a record for several: its figures are the highest, of time the mean."""
    if len(group) == 1:
        return group[0]
    num_steps = sum(step.num_steps for step in group)
    seconds = sum(step.step_seconds * step.num_steps for step in group)
    highest = max(reversed(group), key=lambda step: step.peak_allocated_bytes or 0)
    return StepRecord(
        step=group[-1].step,
        num_steps=num_steps,
        time_seconds=group[-1].time_seconds,
        step_seconds=round(seconds / num_steps, 6),
        peak_allocated_bytes=highest.peak_allocated_bytes,
        peak_reserved_bytes=_known(max, (step.peak_reserved_bytes for step in group)),
        predicted_peak_bytes=highest.predicted_peak_bytes,
        allocator_retries=_known(max, (step.allocator_retries for step in group)),
        host_bytes=_known(max, (step.host_bytes for step in group)),
        micro_batch_size=_known(min, (step.micro_batch_size for step in group)),
        num_samples=_known(sum, (step.num_samples for step in group)),
    )


def _known(of: Callable[[list[int]], int], values: Iterable[int | None]) -> int | None:
    """Take one of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return of(known) if known else None
