"""What a run notes about itself while it goes, as data and as files; no torch.

A run folder holds ``run.json`` (what is run), ``steps.jsonl`` (a line per step), ``events.jsonl``
(a line whenever something happened) and, once it has ended, ``reason.json``. Ranks other than the
first have a folder ``rank-N`` each in it, with the same files.
"""

from __future__ import annotations

from .folder import Journal as Journal
from .folder import read_journal as read_journal
from .folder import read_ranks as read_ranks
from .records import DriftEvent as DriftEvent
from .records import Ending as Ending
from .records import LeakEvent as LeakEvent
from .records import OutOfMemoryEvent as OutOfMemoryEvent
from .records import PlanClimbedEvent as PlanClimbedEvent
from .records import Reason as Reason
from .records import RunFacts as RunFacts
from .records import StepRecord as StepRecord
from .records import UnprovedPlanEvent as UnprovedPlanEvent
from .timeline import StepTimeline as StepTimeline
from .timeline import read_timeline as read_timeline

__all__ = [
    "DriftEvent",
    "Ending",
    "Journal",
    "LeakEvent",
    "OutOfMemoryEvent",
    "PlanClimbedEvent",
    "Reason",
    "RunFacts",
    "StepRecord",
    "StepTimeline",
    "UnprovedPlanEvent",
    "read_journal",
    "read_ranks",
    "read_timeline",
]
