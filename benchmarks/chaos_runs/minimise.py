"""Makes a story that went wrong as small as it can be while it still goes wrong in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from chaos_runs.outcomes import Outcome
from chaos_runs.stories import Fault, JobSpec, Story

T = TypeVar("T")
Lives = tuple[tuple[Fault, ...], ...]
_MOST_TRIES = 60
_OTHER_MOMENTS = (0.15, 0.5, 0.85)
_PLAIN = {"loss": "squares", "optimizer": "sgd", "loader": "list", "dtype": "fp32", "clips": False}


def minimised(outcome: Outcome, carry_out: Callable[[Story], Outcome]) -> Outcome:
    """Return the smallest story found that breaks the same.

    Args:
        outcome: of a story that went wrong.
        carry_out: runs a story.
    """
    wanted, tries = _kind_of(outcome), 0
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for story in smaller(outcome.story):
            if (tries := tries + 1) > _MOST_TRIES:
                return outcome
            found = carry_out(story)
            if found.violations and _kind_of(found) == wanted:
                outcome, is_smaller = found, True
                break
    return outcome


def _kind_of(outcome: Outcome) -> str:
    """Say what went wrong without numbers, names and places."""
    return re.sub(r"[\d.]+|/\S+|life \d+|rank \d+", "", outcome.violations[0])[:40]


def smaller(story: Story) -> Iterator[Story]:
    """Yield stories with one thing less."""
    for lives in _fewer_faults(story.lives):
        yield replace(story, lives=lives)
    for strategies in _without_one(story.strategies):
        yield replace(story, strategies=strategies)
    for job in _plainer(story.job):
        yield replace(story, job=job)
    if story.num_ranks > 2:
        yield _with_two_ranks(story)
    if story.has_journal:
        yield replace(story, has_journal=False)
    if story.saves != "none":
        yield replace(story, saves="none")
    if story.num_steps > 1:
        yield replace(story, num_steps=story.num_steps - 1)
        yield from _at_other_moments(story)


def _plainer(job: JobSpec) -> Iterator[JobSpec]:
    """Yield jobs with a layer less, or with one thing as it usually is."""
    for layers in _without_one(job.layers) if len(job.layers) > 1 else ():
        yield replace(job, layers=layers)
    for name, value in _PLAIN.items():
        if getattr(job, name) != value:
            yield replace(job, **{name: value})


def _without_one(items: tuple[T, ...]) -> Iterator[tuple[T, ...]]:
    for at in range(len(items)):
        yield (*items[:at], *items[at + 1 :])


def _fewer_faults(lives: Lives) -> Iterator[Lives]:
    """Leave out a process, or one of the faults of a process that meets several."""
    if len(lives) > 1:
        yield from _without_one(lives)
    for at, life in enumerate(lives):
        for fewer in _without_one(life) if len(life) > 1 else ():
            yield (*lives[:at], fewer, *lives[at + 1 :])


def _with_two_ranks(story: Story) -> Story:
    lives = tuple(
        tuple(replace(fault, rank=min(fault.rank, 1)) for fault in life) for life in story.lives
    )
    return replace(story, num_ranks=2, lives=lives)


def _at_other_moments(story: Story) -> Iterator[Story]:
    """Try a shorter training with its faults elsewhere, where they may matter as well."""
    for at in _OTHER_MOMENTS:
        lives = tuple(tuple(replace(fault, at=at) for fault in life) for life in story.lives)
        yield replace(story, lives=lives, num_steps=story.num_steps - 1)
