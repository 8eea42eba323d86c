"""The records of a journal: plain data, each line of a file one of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is run, noted when it begins."""

    title: str
    command: str
    """The command line, or the job's name."""
    device: str
    started_at: str
    """ISO 8601, with its time zone."""
    process_id: int
    rank: int = 0
    num_ranks: int = 1
    budget_bytes: int | None = None
    """The enforced budget."""
    strategies: tuple[str, ...] = ()
    """The plan that the run began with."""
    host_name: str = ""
    """The machine, so that another one does not look for the process."""
    finds_leaks: bool | None = None
    """Whether leaks were looked for; None where the run did not note it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step, or several of a long run; None where something is not known."""

    step: int
    """Counted from 1; of several, the last."""
    time_seconds: float
    """Since the run began, at the end of the step."""
    step_seconds: float
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    """Of allocated bytes, under the plan in force."""
    allocator_retries: int | None = None
    """Since the process began: how often the allocator emptied its cache to go on."""
    host_bytes: int | None = None
    """Resident memory of the process at the end of the step."""
    micro_batch_size: int | None = None
    num_samples: int | None = None
    num_steps: int = 1
    """How many it stands for: of several, peaks are the highest, ``step_seconds`` the mean."""

    @property
    def first_step(self) -> int:
        """Return the first of the steps that it stands for."""
        return self.step - self.num_steps + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryEvent:
    """One failed attempt at a step, and what was done about it."""

    step: int
    phase: str
    cause: str
    """The first line of the error."""
    plan: tuple[str, ...]
    """The strategies of the attempt."""
    next_plan: tuple[str, ...]
    num_steps_repeated: int
    """Steps before it that were run again, because the update itself was cut."""
    rank: int = 0
    """The first rank that ran out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanClimbedEvent:
    """A larger plan that is tried again, after steps that went well."""

    step: int
    plan: tuple[str, ...]
    next_plan: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftEvent:
    """A measured peak that is not the predicted one, and the category that differs most."""

    step: int
    predicted_bytes: int
    measured_bytes: int
    category: str
    predicted_category_bytes: int
    measured_category_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakEvent:
    """Something that keeps growing over equal steps, and what holds it."""

    step: int
    """When it was found."""
    kind: str
    """For example ``list``, ``metric-state``, ``autograd-graph``, ``hooks``."""
    holder: str
    """The attribute path, as in ``model.head.metrics.auroc.preds``, or the name of the variable."""
    chain: tuple[str, ...]
    """From a module or frame to what grows, each link as Python would write it."""
    source_line: str
    """``file.py:12``, where what grows is made; empty where not known."""
    growth_bytes_per_step: float
    total_growth_bytes: int
    """Since it was first seen."""
    num_steps: int
    """Over how many steps it was seen to grow."""
    place: str
    """``host`` or ``cuda:0``: whose memory it takes."""
    sentence: str
    """What grows, where, and what to do, in one or two sentences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnprovedPlanEvent:
    """A plan whose pieces could not be proved to keep the results, and what a batch shows."""

    step: int
    """The first that was run so."""
    plan: tuple[str, ...]
    strategy: str
    reason: str
    """What could not be followed, as a sentence."""
    trial: str
    """What the gradients of that step's batch show, as a sentence."""


Event = OutOfMemoryEvent | PlanClimbedEvent | DriftEvent | LeakEvent | UnprovedPlanEvent


class Reason(StrEnum):
    """Say why a run ended."""

    DONE = "done"
    LEAK = "leak"
    """Memory ran out, or the budget was exceeded, and a leak accounts for it."""
    BUDGET_EXCEEDED = "budget-exceeded"
    """The enforced budget was exceeded, and nothing was seen to leak."""
    OUT_OF_MEMORY = "out-of-memory"
    """A device or the host refused an allocation."""
    HOST_OUT_OF_MEMORY_KILLER = "host-out-of-memory-killer"
    LOST_CONTEXT = "lost-context"
    """Nothing more could be done on the card in that process."""
    SIGNAL = "signal"
    INTERRUPTED = "interrupted"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended."""

    reason: Reason
    ended_by: str
    """What ended it in the first place: the reason itself, or what a leak led to."""
    exit_code: int
    sentence: str
    """What happened, with its numbers."""
    remedy: str
    """What to do next; empty for a run that is done."""
    evidence: tuple[str, ...] = ()
    """What the reason was told from."""
    num_steps: int = 0
    peak_allocated_bytes: int | None = None
    host_peak_bytes: int | None = None
    budget_bytes: int | None = None
    is_planned: bool | None = None
    """Whether all trainings seen were planned, where that was asked for."""
    unplanned: str = ""
    """Why one was not."""
    leaks: tuple[LeakEvent, ...] = ()
    signal: int | None = None
    """The number of the signal that killed the process."""
