"""What the journal of a run says of its running out of memory, and what it cannot say.

A journal has a line per step, not per allocation: peaks, events and the ending. So it names the
step, its peak and what held it, and leaves open what a snapshot answers: free memory and settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memfit.errors import DataError
from memfit.journal.folder import Journal, holds_journal, read_ranks
from memfit.journal.records import Ending, LeakEvent, OutOfMemoryEvent, Reason, StepRecord
from memfit.journal.sentences import event_sentence
from memfit.journal.timeline import StepTimeline, read_timeline

_OF_MEMORY = frozenset({
    Reason.OUT_OF_MEMORY.value,
    Reason.BUDGET_EXCEEDED.value,
    Reason.HOST_OUT_OF_MEMORY_KILLER.value,
    Reason.LEAK.value,
})  # fmt: skip
_MOST_NAMED = 3
_NO_EVENTS = (
    "A journal has peaks per step and no allocations: which blocks were free, and what other "
    "allocator settings would have changed, is not in it."
)
_HOW = (
    "For that, record a snapshot: call torch.cuda.memory._record_memory_history(max_entries="
    "100000) at the start and torch.cuda.memory._dump_snapshot(FILE) where the error is caught, "
    "then replay that file."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReplay:
    """What is known of a run that ran out of memory, or of its peak."""

    kind: str
    """``run-failure`` if the run ended for want of memory, else ``run-peak``."""
    source: str
    rank: int
    """The rank that is described: the one that ran out, else the one with the highest peak."""
    reason: str
    """Why the run ended; empty where that is not written."""
    sentence: str
    remedy: str
    failed_step: int | None
    """The step that ran out: the one after the last measured, or the one an event names."""
    phase: str
    last_step: int | None
    peak_step: int | None
    """The step with the highest peak."""
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    predicted_peak_bytes: int | None
    budget_bytes: int | None
    allocator_retries: int | None
    by_category: Mapping[str, int]
    """At the highest point of the one step whose timeline was kept; empty without one."""
    category_step: int | None
    leaks: Sequence[LeakEvent]
    events: Sequence[str]
    """Each time that memory ran out, as a sentence."""
    snapshots: Sequence[str]
    """Files in the folder that look like snapshots, to be replayed themselves."""
    notes: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values under the names of the fields."""
        return asdict(self)


def replay_run(folder: Path) -> RunReplay:
    """Read what a run folder says of running out of memory.

    Raises:
        DataError: if there is no journal in it, or one of its files is damaged.
    """
    snapshots = tuple(sorted(str(path) for path in _snapshots(folder)))
    if snapshots and not holds_journal(folder):
        shown = ", ".join(snapshots[:_MOST_NAMED])
        more = f" and {len(snapshots) - _MOST_NAMED} more" if len(snapshots) > _MOST_NAMED else ""
        raise DataError(
            str(folder), f"it holds no journal, but snapshots: {shown}{more}. Replay one of them"
        )
    journals = read_ranks(folder)
    rank = _rank(journals)
    journal = journals[rank]
    ending = journal.ending or journals[min(journals)].ending
    failures = [each for each in journal.events if isinstance(each, OutOfMemoryEvent)]
    peak = max(journal.steps, key=lambda each: each.peak_allocated_bytes or 0, default=None)
    last = journal.steps[-1] if journal.steps else None
    is_failure = ending is not None and ending.reason in _OF_MEMORY
    timeline = read_timeline(journal.folder)
    by_category, category_step = _at_highest(timeline)
    return RunReplay(
        kind="run-failure" if is_failure else "run-peak",
        source=str(folder),
        rank=rank,
        reason="" if ending is None else ending.reason,
        sentence="" if ending is None else ending.sentence,
        remedy="" if ending is None else ending.remedy,
        failed_step=_failed_step(failures, last, is_failure=is_failure),
        phase=failures[-1].phase if failures else "",
        last_step=None if last is None else last.step,
        peak_step=None if peak is None else peak.step,
        peak_allocated_bytes=_highest(journal.steps, "peak_allocated_bytes"),
        peak_reserved_bytes=_highest(journal.steps, "peak_reserved_bytes"),
        predicted_peak_bytes=_highest(journal.steps, "predicted_peak_bytes"),
        budget_bytes=_budget(journal, ending),
        allocator_retries=_highest(journal.steps, "allocator_retries"),
        by_category=by_category,
        category_step=category_step,
        leaks=() if ending is None else ending.leaks,
        events=tuple(event_sentence(each) for each in failures),
        snapshots=snapshots,
        notes=tuple(_notes(journal, timeline, is_failure=is_failure)),
    )


def _rank(journals: Mapping[int, Journal]) -> int:
    """Choose the rank that ran out, else the one with the highest peak."""

    def weight(rank: int) -> tuple[bool, int, int]:
        ending = journals[rank].ending
        peak_bytes = _highest(journals[rank].steps, "peak_allocated_bytes") or 0
        return ending is not None and ending.reason in _OF_MEMORY, peak_bytes, -rank

    return max(journals, key=weight)


def _failed_step(
    failures: Sequence[OutOfMemoryEvent], last: StepRecord | None, *, is_failure: bool
) -> int | None:
    """Name the step that ran out: the one after the last measured, since it left no line."""
    if is_failure:
        return 1 if last is None else last.step + 1
    return failures[-1].step if failures else None


def _highest(steps: Sequence[StepRecord], name: str) -> int | None:
    return max(
        (value for step in steps if (value := getattr(step, name)) is not None), default=None
    )


def _budget(journal: Journal, ending: Ending | None) -> int | None:
    if ending is not None and ending.budget_bytes is not None:
        return ending.budget_bytes
    return None if journal.facts is None else journal.facts.budget_bytes


def _at_highest(timeline: StepTimeline | None) -> tuple[Mapping[str, int], int | None]:
    """Return what held the memory where the kept timeline is highest."""
    if timeline is None or not timeline.measured.allocated_bytes:
        return {}, None
    totals = timeline.measured.allocated_bytes
    highest = max(range(len(totals)), key=totals.__getitem__)
    parts = timeline.measured.by_category
    held = {name: values[highest] for name, values in parts.items() if values[highest]}
    return dict(sorted(held.items(), key=lambda item: -item[1])), timeline.step


def _snapshots(folder: Path) -> Iterator[Path]:
    for pattern in ("*.pickle", "*.pkl", "*.pickle.gz"):
        yield from folder.glob(pattern)


def _notes(journal: Journal, timeline: StepTimeline | None, *, is_failure: bool) -> Iterator[str]:
    if journal.ending is None:
        yield "No ending is written: the run is going on, or its process was killed."
    elif not is_failure:
        yield "The run did not end for want of memory; what is shown is its highest step."
    if not journal.steps:
        yield "No step was measured before the end."
    elif is_failure:
        yield "The step that failed left no peak; those shown are of the steps before it."
    if timeline is None:
        yield "No timeline was kept, so what held the memory is not known by category."
    yield _NO_EVENTS
    yield _HOW
