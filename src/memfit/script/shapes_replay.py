"""Replays steps of batches of many shapes, one after the other, through an allocator."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from memfit.allocator.caching import CachingAllocator, DeviceExhaustedError
from memfit.allocator.settings import AllocatorSettings
from memfit.allocator.simulate import AllocatorRules
from memfit.script.step_sizes import SizedStep
from memfit.script.step_templates import BORN, StepTemplate
from memfit.trace.events import Category, StepMark, Trace

_OLDEST = 4
"""Steps that may free what one step has handed on; as in the templates."""


class Blocks(Protocol):
    """What gives and takes back blocks; what it gives is what it takes back."""

    allocated_bytes: int
    peak_allocated_bytes: int

    def allocate(self, num_bytes: int) -> Any:
        """Give a block."""
        ...

    def free(self, block: Any) -> None:
        """Take a block back."""
        ...

    def reset_peaks(self) -> None:
        """Let the peak begin anew."""
        ...


class Sum:
    """Add up rounded sizes, without an allocator's segments."""

    def __init__(self, rules: AllocatorRules) -> None:
        self._rounded = rules.rounded
        self.allocated_bytes = 0
        self.peak_allocated_bytes = 0

    def allocate(self, num_bytes: int) -> int:
        """Count a block, and give its rounded bytes."""
        taken = self._rounded(num_bytes)
        self.allocated_bytes += taken
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return taken

    def free(self, block: Any) -> None:
        """Take back what was given."""
        self.allocated_bytes -= block

    def reset_peaks(self) -> None:
        """Let the peak begin anew."""
        self.peak_allocated_bytes = self.allocated_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutcome:
    """What became of a sequence of steps in the caching allocator."""

    num_steps: int
    """Replayed: fewer than were asked for where time ran out or the card did."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    end_allocated_bytes: int
    end_reserved_bytes: int
    fragmentation_fraction: float
    """The part of the highest reserved bytes that lies above the highest allocated ones."""
    num_retries: int
    """Times that all cached blocks were given back because the card had no more."""
    survived: bool
    failed_step: int | None
    replay_seconds: float
    is_as_set: bool = True
    """Whether the setting is the one under which the prediction is made."""


class StepSequence:
    """Carry out steps in an allocator, from the state in which the recorded steps left it.

    What the steps before the scan had alive is allocated in the order in which it was made.

    Args:
        history: the whole recording.
        mark: the last step before the scan.
        steps: the templates of the recorded steps up to that one.
        blocks: where blocks come from.
    """

    def __init__(
        self, history: Trace, mark: StepMark, steps: Sequence[StepTemplate], blocks: Blocks
    ) -> None:
        self._blocks = blocks
        self._ages: list[tuple[StepTemplate, dict[int, Any]]] = []
        alive = self._begin(history, mark)
        for template in steps[-_OLDEST:]:
            carried = {
                place: alive[index]
                for place, index in enumerate(template.carried)
                if index in alive
            }
            self._ages.append((template, carried))

    def _begin(self, history: Trace, mark: StepMark) -> dict[int, Any]:
        allocate, free = self._blocks.allocate, self._blocks.free
        alive: dict[int, Any] = {}
        for event in history.events[: mark.last_event]:
            if event < 0:
                block = alive.pop(-1 - event, None)
                if block is not None:
                    free(block)
            elif history.allocations[event].num_bytes:
                alive[event] = allocate(history.allocations[event].num_bytes)
        # Workspaces that later steps made once are there from then on.
        for event in history.events[mark.last_event :]:
            if event >= 0 and history.allocations[event].category is Category.WORKSPACES:
                allocate(history.allocations[event].num_bytes)
        return alive

    def step(self, sized: SizedStep) -> None:
        """Carry out one step; its peak is that of the blocks since."""
        template, sizes = sized.template, sized.sizes
        self._blocks.reset_peaks()
        own: dict[int, Any] = {}
        position = 0
        for each in template.passing:
            self._events(template.events[position : each.position], sizes, own)
            self._pass(each.first_block, each.num_blocks, sizes)
            position = each.position
        self._events(template.events[position:], sizes, own)
        places = {number: place for place, number in enumerate(template.handed_on)}
        self._ages.append((template, {places[n]: b for n, b in own.items() if n in places}))
        self._free_the_rest()

    def _events(
        self, events: Sequence[tuple[int, int]], sizes: Sequence[int], own: dict[int, Any]
    ) -> None:
        allocate, free, ages = self._blocks.allocate, self._blocks.free, self._ages
        for age, number in events:
            if age == BORN:
                if sizes[number]:
                    own[number] = allocate(sizes[number])
                continue
            blocks = own if age == 0 else ages[-age][1] if age <= len(ages) else {}
            block = blocks.pop(number, None)
            if block is not None:
                free(block)

    def _pass(self, first: int, count: int, sizes: Sequence[int]) -> None:
        taken = [self._blocks.allocate(size) for size in sizes[first : first + count] if size]
        for block in reversed(taken):
            self._blocks.free(block)

    def _free_the_rest(self) -> None:
        """Free what is due, where a step of another order followed than the recorded one."""
        self._ages = self._ages[-_OLDEST - 1 :]
        for age, (template, carried) in enumerate(reversed(self._ages)):
            due = [place for place in carried if template.deaths[template.handed_on[place]] <= age]
            for place in due:
                self._blocks.free(carried.pop(place))


def peaks_of(sequence: StepSequence, blocks: Blocks, steps: Sequence[SizedStep]) -> list[int]:
    """Return the allocated peak of each step, in bytes."""
    peaks = []
    for each in steps:
        sequence.step(each)
        peaks.append(blocks.peak_allocated_bytes)
    return peaks


def replay_sequence(
    begin: Callable[[CachingAllocator], StepSequence],
    steps: Sequence[SizedStep],
    *,
    settings: AllocatorSettings,
    capacity_bytes: int | None,
    most_seconds: float,
) -> SequenceOutcome:
    """Replay steps through the caching allocator, on one stream.

    Args:
        begin: brings an allocator into the state before the first step.
        steps: in order.
        settings: of the allocator.
        capacity_bytes: what the card gives the allocator in all; None means no end.
        most_seconds: after which the replay ends with the steps that were done.
    """
    started = time.perf_counter()
    allocator = CachingAllocator(settings, capacity_bytes)
    peak = done = 0
    failed: int | None = None
    try:
        sequence = begin(allocator)
        for each in steps:
            if time.perf_counter() - started > most_seconds:
                break
            sequence.step(each)
            peak = max(peak, allocator.peak_allocated_bytes)
            done += 1
    except DeviceExhaustedError:
        failed = done
        peak = max(peak, allocator.peak_allocated_bytes)
    highest_bytes = allocator.device.highest_reserved_bytes
    return SequenceOutcome(
        num_steps=done,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=highest_bytes,
        end_allocated_bytes=allocator.allocated_bytes,
        end_reserved_bytes=allocator.reserved_bytes,
        fragmentation_fraction=1 - peak / highest_bytes if highest_bytes else 0.0,
        num_retries=allocator.num_retries,
        survived=failed is None,
        failed_step=failed,
        replay_seconds=time.perf_counter() - started,
    )
