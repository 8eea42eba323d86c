"""Find the phases in a timeline and the points to draw of it, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.figures import Timeline
from memfit.journal.timeline import downsample as downsample
from memfit.journal.timeline import kept_events as kept_events


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSpan:
    """A phase of the step, from the event ``start`` to the event ``end``."""

    start: float
    end: float
    name: str


def phase_spans(timeline: Timeline) -> list[PhaseSpan]:
    """Return each phase its span among the events; neighbours of one name are joined."""
    axis = timeline.axis()
    last = max(0, len(axis) - 1)
    starts: list[tuple[float, str]] = []
    for event, name in timeline.phases:
        if not starts or starts[-1][1] != name:
            starts.append((float(axis[min(event, last)]), name))
    ends = [start for start, _ in starts[1:]] + [float(axis[last])]
    return [
        PhaseSpan(start=start, end=end, name=name)
        for (start, name), end in zip(starts, ends, strict=True)
        if end > start
    ]


def highest_events(allocated_bytes: Sequence[int], max_points: int) -> list[int]:
    """Choose the highest event of every stretch: the upper edge of a long timeline."""
    count = len(allocated_bytes)
    if count <= max_points:
        return list(range(count))
    stretches = max_points - 2
    highest = {
        max(
            range(stretch * count // stretches, (stretch + 1) * count // stretches),
            key=allocated_bytes.__getitem__,
        )
        for stretch in range(stretches)
    }
    return sorted(highest | {0, count - 1})


def labelled_spans(spans: Sequence[PhaseSpan], events_per_letter: float) -> list[PhaseSpan]:
    """Name the phases that have room for a name.

    Where the phases of micro-batches are too narrow for theirs, one name stands for all of them.
    """

    def has_room(span: PhaseSpan) -> bool:
        return len(span.name) * events_per_letter <= span.end - span.start

    repeated = [span for span in spans if span.name in ("forward", "backward")]
    # A loop may go on after the update, with the forward of the next step.
    times = sum(span.name == "backward" for span in repeated)
    if times > 1 and not all(has_room(span) for span in repeated):
        joined = PhaseSpan(
            start=repeated[0].start,
            end=repeated[-1].end,
            name=f"forward and backward, {times} times",
        )
        outside = [span for span in spans if span.end <= joined.start or span.start >= joined.end]
        spans = [*outside, joined]
    shortened = [
        PhaseSpan(start=span.start, end=span.end, name="opt.")
        if span.name == "optimizer" and not has_room(span)
        else span
        for span in spans
    ]
    return [span for span in shortened if has_room(span)]
