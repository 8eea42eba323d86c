"""Recordings of one job, each combination of strategies made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from memfit import Job, Plan
from memfit.prediction.recording import Recording, record
from memfit.trace.abridgement import is_abridged

Recorded = Callable[..., Recording]
_USERS = (
    "memfit.planner.one_placement",
    "memfit.planner.search.evaluation",
    "memfit.prediction.brief_recording",
)


@contextmanager
def recorded_once(job: Job) -> Iterator[Recorded]:
    """Have planner and measurements of a job on the CPU share recordings; return what records.

    Recording is deterministic, so this changes how long planning takes and nothing else.
    """
    known: dict[Any, Recording] = {}

    def recorded(asked: Job, plan: Plan | None = None, *rest: Any, **settings: Any) -> Recording:
        assert asked.model is job.model, "the recordings of one job at a time"
        if is_abridged():
            return record(asked, plan, *rest, **settings)
        key = ((plan or Plan()).strategies, asked.batch_size)
        if key not in known:
            known[key] = record(asked, plan, *rest, **settings)
        return known[key]

    with ExitStack() as stack:
        for user in _USERS:
            stack.enter_context(patch(f"{user}.record", recorded))
        yield recorded
