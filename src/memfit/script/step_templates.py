"""Turns recorded steps into templates: what a step allocates and frees, apart from its sizes."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from memfit.trace.events import Category, StepMark, Trace

BORN = -1
"""In the place of an age: the block is allocated."""
_OLDEST = 4
"""Steps after which a block that was not freed is taken to stay."""
STAYS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Passing:
    """Blocks that one operator takes together and gives back at once: scratch, above all."""

    position: int
    """How many events of the template come before."""
    operator: str
    first_block: int
    """Its first block; the others follow."""
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTemplate:
    """The order of allocations and frees in a step, and its sizes as they were recorded.

    ``events`` holds ``(BORN, n)`` where the step's ``n``-th lasting block is allocated, ``(0, n)``
    where it is freed, and ``(age, n)`` where the ``n``-th of the blocks is freed that the step
    ``age`` steps before has handed on.
    """

    operators: tuple[str, ...]
    """Of the lasting blocks, what has asked for them."""
    events: tuple[tuple[int, int], ...]
    deaths: tuple[int, ...]
    """Of each lasting block, after how many steps it is freed; ``STAYS``: not at all."""
    sizes: tuple[int, ...]
    """In bytes, as requested: of the lasting blocks, and then of those that pass."""
    passing: tuple[Passing, ...]
    handed_on: tuple[int, ...]
    """The lasting blocks that outlive the step."""
    carried: tuple[int, ...]
    """Their allocations in the recorded history."""

    def has_order_of(self, other: StepTemplate) -> bool:
        """Return whether operators, allocations and frees of lasting blocks come in one order."""
        return self.operators == other.operators and self.events == other.events


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The events of one step: allocations of its own, and frees of what steps have made."""

    events: list[int]
    operators: dict[int, str]
    passing: list[tuple[int, tuple[int, ...]]]
    lasting: list[int]


def templates(history: Trace, marks: Sequence[StepMark]) -> list[StepTemplate]:
    """Return the template of each recorded step.

    Workspaces of libraries are left out: they are made once and kept. So is what lies between the
    steps, but for the frees of what a step has made, which the next step does first.

    Limits: a block that is freed more than four steps later is taken to stay.
    """
    steps = _steps(history, marks)
    born = {index: number for number, step in enumerate(steps) for index in step.lasting}
    # What is freed before a step counts to it.
    ends = [mark.last_event for mark in marks]
    freed_in = {
        -1 - event: bisect.bisect_right(ends, position)
        for position, event in enumerate(history.events)
        if event < 0
    }
    deaths = {
        index: _age_at_death(freed_in.get(index), number, len(marks))
        for index, number in born.items()
    }
    handed_on = [[index for index in step.lasting if deaths[index] > 0] for step in steps]
    places = [{index: place for place, index in enumerate(each)} for each in handed_on]
    lives = _Lives(born=born, deaths=deaths, places=places)
    return [_template(history, number, step, lives) for number, step in enumerate(steps)]


def _steps(history: Trace, marks: Sequence[StepMark]) -> list[_Step]:
    steps = []
    for number, mark in enumerate(marks):
        own = {
            event
            for event in history.events[mark.first_event : mark.last_event]
            if event >= 0 and history.allocations[event].category is not Category.WORKSPACES
        }
        first = marks[number - 1].last_event if number else mark.first_event
        events = [
            event for event in history.events[first : mark.last_event] if event < 0 or event in own
        ]
        operators = {index: history.allocations[index].operator for index in own}
        events, passing = _without_passing(events, operators)
        lasting = [event for event in events if event >= 0]
        steps.append(_Step(events=events, operators=operators, passing=passing, lasting=lasting))
    return steps


def _without_passing(
    events: list[int], operators: dict[int, str]
) -> tuple[list[int], list[tuple[int, tuple[int, ...]]]]:
    """Take out what an operator takes and gives back at once; say where it was, and the blocks."""
    kept: list[int] = []
    passing = []
    position = 0
    while position < len(events):
        last = position
        while last < len(events) and events[last] < 0:
            last += 1
        kept += events[position:last]
        position = last
        if position == len(events):
            break
        while (
            last < len(events)
            and events[last] >= 0
            and (operators[events[last]] == operators[events[position]])
        ):
            last += 1
        run = events[position:last]
        num_back = 0
        while (
            num_back < len(run)
            and last + num_back < len(events)
            and events[last + num_back] == -1 - run[-1 - num_back]
        ):
            num_back += 1
        kept += run[: len(run) - num_back]
        if num_back:
            passing.append((len(kept), tuple(run[len(run) - num_back :])))
        position = last + num_back
    return kept, passing


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lives:
    """Of lasting blocks: the step, the age at death, and the place among what a step hands on."""

    born: dict[int, int]
    deaths: dict[int, int]
    places: list[dict[int, int]]


def _template(history: Trace, number: int, step: _Step, lives: _Lives) -> StepTemplate:
    born, deaths, places = lives.born, lives.deaths, lives.places
    numbers = {index: place for place, index in enumerate(step.lasting)}
    events: list[tuple[int, int]] = []
    before = [0]
    for event in step.events:
        index = event if event >= 0 else -1 - event
        if event >= 0:
            events.append((BORN, numbers[index]))
        elif index in numbers:
            events.append((0, numbers[index]))
        elif index in born and number - born[index] <= _OLDEST:
            events.append((number - born[index], places[born[index]][index]))
        before.append(len(events))
    blocks = list(step.lasting)
    passing = []
    for position, group in step.passing:
        passing.append(
            Passing(
                position=before[position],
                operator=step.operators[group[0]],
                first_block=len(blocks),
                num_blocks=len(group),
            )
        )
        blocks += group
    carried = places[number]
    return StepTemplate(
        operators=tuple(step.operators[index] for index in step.lasting),
        events=tuple(events),
        deaths=tuple(deaths[index] for index in step.lasting),
        sizes=tuple(history.allocations[index].num_bytes for index in blocks),
        passing=tuple(passing),
        handed_on=tuple(numbers[index] for index in carried),
        carried=tuple(carried),
    )


def _age_at_death(freed_in: int | None, step: int, num_steps: int) -> int:
    """Return after how many steps a block is freed."""
    if freed_in is not None and freed_in < num_steps:
        age = freed_in - step
        return age if age <= _OLDEST else STAYS
    # Of the last steps nobody saw what the next one would have freed.
    return STAYS if step < num_steps - 2 else 1
