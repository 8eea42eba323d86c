"""Turns growth that was judged a leak into events, one for each holder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memfit.journal.records import LeakEvent

from .rules import Growth
from .wording import sentence_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Growth that is a leak, with its kind."""

    growth: Growth
    kind: str

    @property
    def group(self) -> tuple[int, str]:
        """Return what is told together: the states of one metric, the lists of one object."""
        parent = self.growth.node.parent
        is_grouped = parent is not None and parent.kind not in {"namespace", "frame"}
        return (parent.key if parent is not None and is_grouped else id(self), self.kind)


class Namer:
    """Make events, and see that each holder is told once."""

    def __init__(self) -> None:
        self.events: tuple[LeakEvent, ...] = ()
        self._told: set[int] = set()

    def is_told(self, growth: Growth) -> bool:
        """Return whether this holder, or one above or below it, was told."""
        return any(node.key in self._told for node in growth.node.lineage())

    def tell(self, verdicts: list[Verdict], lines: Mapping[int, str], step: int) -> list[LeakEvent]:
        """Make the events of verdicts, those of one owner together."""
        groups: dict[tuple[int, str], list[Verdict]] = {}
        # What was seen over passes says more than what was seen in steps.
        for verdict in sorted(verdicts, key=lambda each: not each.growth.num_passes):
            if not self.is_told(verdict.growth):
                groups.setdefault(verdict.group, []).append(verdict)
                self._told.add(verdict.growth.node.key)
        events = [_event(group, lines, step) for group in groups.values()]
        self.events += tuple(events)
        return events

    def add(self, event: LeakEvent) -> None:
        """Add an event that no holder was found for."""
        self.events += (event,)


def _event(group: list[Verdict], lines: Mapping[int, str], step: int) -> LeakEvent:
    largest = group[0]
    growth, node = largest.growth, largest.growth.node
    total = sum(each.growth.num_bytes for each in group)
    whole = Growth(
        node=node,
        kind=largest.kind,
        num_bytes=total,
        num_boundaries=growth.num_boundaries,
        num_passes=growth.num_passes,
        num_added=growth.num_added,
    )
    found = [lines.get(each.growth.node.key, "") for each in group]
    line = next((each for each in found if each), "")
    others = tuple(each.growth.node.text().lstrip(".") for each in group[1:4])
    holder = node.holder()
    return LeakEvent(
        step=step,
        kind=largest.kind,
        holder=holder,
        chain=node.chain(),
        source_line=line,
        growth_bytes_per_step=total / max(1, growth.num_boundaries),
        total_growth_bytes=int(total),
        num_steps=growth.num_boundaries,
        place=node.place,
        sentence=sentence_of(largest.kind, holder, whole, line, others),
    )
