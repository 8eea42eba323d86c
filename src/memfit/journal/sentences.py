"""The words for the events of a journal, the same in every place that shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from memfit.units import format_bytes, format_fraction

from .records import (
    DriftEvent,
    Event,
    LeakEvent,
    OutOfMemoryEvent,
    PlanClimbedEvent,
    UnprovedPlanEvent,
)

PLAIN = "the plain step"
"""What a plan without strategies is called."""


def plan_words(strategies: Sequence[str]) -> str:
    """Name a plan by its strategies."""
    return " + ".join(strategies) or PLAIN


def event_sentence(event: Event) -> str:
    """Say in a sentence or two what happened."""
    match event:
        case OutOfMemoryEvent():
            return _out_of_memory(event)
        case PlanClimbedEvent():
            return (
                f"Step {event.step:,} tries a larger plan again: {plan_words(event.next_plan)} "
                f"instead of {plan_words(event.plan)}."
            )
        case DriftEvent():
            return drift_sentence(event)
        case LeakEvent():
            return f"Leak, found at step {event.step:,}: {event.sentence}"
        case UnprovedPlanEvent():
            return (
                f"{event.strategy} could not be proved to keep the results: {event.reason} Tried "
                f"before step {event.step:,}: {event.trial}"
            )
        case _:
            assert_never(event)


def _out_of_memory(event: OutOfMemoryEvent) -> str:
    if event.plan == event.next_plan:
        then = f"it is run again under the same plan, {plan_words(event.plan)}"
    else:
        then = f"it goes on with {plan_words(event.next_plan)} instead of {plan_words(event.plan)}"
    repeated = ""
    if event.num_steps_repeated:
        repeated = f"; {event.num_steps_repeated} steps before it were repeated"
    return f"Step {event.step:,} ran out of memory in {event.phase}; {then}{repeated}."


def drift_sentence(event: DriftEvent) -> str:
    """Return how far a measured peak is from the predicted one, and what differs most."""
    off = ""
    if event.predicted_bytes:
        fraction = event.measured_bytes / event.predicted_bytes - 1
        off = f" ({format_fraction(fraction)})"
    return (
        f"Step {event.step:,} took {format_bytes(event.measured_bytes)}, predicted "
        f"{format_bytes(event.predicted_bytes)}{off}; what differs is {event.category}: "
        f"{format_bytes(event.measured_category_bytes)} instead of "
        f"{format_bytes(event.predicted_category_bytes)}."
    )
