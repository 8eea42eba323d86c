"""Lays the allocator's events of one step out by category, by when blocks came and went.

A block that forward leaves behind is a saved activation, one that backward leaves behind a
gradient, one that the update leaves behind optimizer state; all others are temporaries. What lay
there when the step began is known by its owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from memfit.figures import Timeline
from memfit.observe.allocator_events import AllocatorEvent
from memfit.trace.events import Category, Phase, category_names

_LEFT_BY = {
    Phase.FORWARD: Category.SAVED_ACTIVATIONS,
    Phase.BACKWARD: Category.GRADIENTS,
    Phase.OPTIMIZER: Category.OPTIMIZER_STATE,
}


@dataclass(frozen=True, slots=True)
class PhaseMark:
    """When a phase began."""

    time_ns: int
    phase: Phase


def step_timeline(
    events: Sequence[AllocatorEvent],
    marks: Sequence[PhaseMark],
    at_start: Mapping[Category, int],
) -> Timeline:
    """Return the allocated bytes over a step by category.

    Args:
        events: of the allocator during the step, in order.
        marks: when phases began, in order; a step with micro-batches has many.
        at_start: bytes that lay there when the step began.
    """
    phases = list(_phases(events, marks))
    categories = _categories(events, phases)
    changes = (
        (category.value, event.num_bytes)
        for event, category in zip(events, categories, strict=True)
    )
    starts = [
        (position, phase.value)
        for position, phase in enumerate(phases)
        if position == 0 or phase is not phases[position - 1]
    ]
    here = {name: at_start.get(Category(name), 0) for name in category_names(())}
    return Timeline.of(here, changes, starts)


def _phases(events: Sequence[AllocatorEvent], marks: Sequence[PhaseMark]) -> Iterator[Phase]:
    """Yield the phase of each event."""
    phase, position = Phase.FORWARD, 0
    for event in events:
        while position < len(marks) and marks[position].time_ns <= event.time_ns:
            phase = marks[position].phase
            position += 1
        yield phase


def _categories(events: Sequence[AllocatorEvent], phases: Sequence[Phase]) -> list[Category]:
    """Return the category of each event's block; one that lay there before is a temporary."""
    found = [Category.TEMPORARIES] * len(events)
    allocated: dict[int, int] = {}
    for position, event in enumerate(events):
        if event.num_bytes > 0:
            allocated[event.address] = position
            continue
        began = allocated.pop(event.address, None)
        if began is not None and _outlived(phases[began], phases[position]):
            found[began] = found[position] = _LEFT_BY[phases[began]]
    for began in allocated.values():  # never freed within the step
        found[began] = _LEFT_BY[phases[began]]
    return found


def _outlived(made_in: Phase, freed_in: Phase) -> bool:
    """Return whether a block has outlived the phase that made it, and was no temporary of it."""
    if made_in is Phase.FORWARD:
        return freed_in is not Phase.FORWARD
    return made_in is Phase.BACKWARD and freed_in is Phase.OPTIMIZER
