"""What a run noted about itself, added up: the page, the terminal and JSON show these records."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

from memfit.errors import DataError, PlanFileError
from memfit.journal.folder import (
    FACTS_NAME,
    JOURNAL_NAMES,
    NO_JOURNAL,
    PLAN_NAME,
    Journal,
    holds_journal,
    read_ranks,
)
from memfit.journal.plan_words import KnownPlan, read_plan_words
from memfit.journal.records import (
    DriftEvent,
    Ending,
    Event,
    LeakEvent,
    OutOfMemoryEvent,
    PlanClimbedEvent,
    Reason,
    RunFacts,
    StepRecord,
)
from memfit.journal.timeline import StepTimeline, read_timeline

from .run_state import State, state_of
from .training import Training, read_metrics, read_training

_E = TypeVar("_E", bound=Event)
_E_co = TypeVar("_E_co", bound=Event, covariant=True)
_P = TypeVar("_P", OutOfMemoryEvent, PlanClimbedEvent)
_T = TypeVar("_T")
_MOST_NAMED = 3
_LONGEST_TITLE = 72


@dataclass(frozen=True, slots=True, kw_only=True)
class Told(Generic[_E_co]):
    """An event and the rank that noted it."""

    rank: int
    event: _E_co


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """The steps of one rank, added up; None where nothing was measured."""

    rank: int
    state: State
    ending: Ending | None
    num_steps: int
    last_step: int
    seconds: float
    """From the beginning of the run to the end of the last step."""
    median_step_seconds: float | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    predicted_peak_bytes: int | None
    """For the step with the highest measured peak; without one, for the last step."""
    host_peak_bytes: int | None
    allocator_retries: int | None
    num_out_of_memory: int
    num_leaks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Everything that is shown of a run."""

    folder: Path
    facts: RunFacts | None
    state: State
    ending: Ending | None
    written_at: str
    """When the journal was last written to, ISO 8601."""
    budget_bytes: int | None
    ranks: tuple[RankSummary, ...]
    steps: Mapping[int, Sequence[StepRecord]]
    """By rank."""
    out_of_memory: tuple[Told[OutOfMemoryEvent], ...]
    climbs: tuple[Told[PlanClimbedEvent], ...]
    drifts: tuple[Told[DriftEvent], ...]
    leaks: tuple[Told[LeakEvent], ...]
    plan: KnownPlan | None
    timeline: StepTimeline | None
    training: Training | None
    """What a training system has written beside the journal."""
    metrics: Sequence[Mapping[str, Any]]
    """Of a training system: a line per epoch or validation."""
    notes: tuple[str, ...]
    """What could not be read."""

    @property
    def title(self) -> str:
        """Name the run."""
        if self.training is not None:
            return self.training.title
        return _title_of(self.facts) if self.facts else self.folder.resolve().name

    @property
    def highest_rank(self) -> RankSummary:
        """Return the rank with the highest peak; where none was measured, the first."""
        return max(self.ranks, key=lambda rank: rank.peak_allocated_bytes or 0)

    @property
    def peak_allocated_bytes(self) -> int | None:
        """Return the highest measured peak; of a training, what it has said itself."""
        if self.training is not None and self.training.run_peak_bytes is not None:
            return self.training.run_peak_bytes
        return self.highest_rank.peak_allocated_bytes

    @property
    def command(self) -> str:
        """Return the command line that repeats the run; empty where it is not known."""
        if self.training is not None:
            return self.training.command
        return self.facts.command if self.facts is not None else ""

    @property
    def num_steps(self) -> int:
        """Count the steps of the rank that got furthest."""
        return max(rank.num_steps for rank in self.ranks)

    @property
    def begun_with(self) -> tuple[str, ...]:
        """Return the strategies of the plan that the run began with."""
        if self.facts is not None:
            return self.facts.strategies
        return self.plan.strategies if self.plan is not None else ()

    def plan_changes(self) -> list[Told[OutOfMemoryEvent | PlanClimbedEvent]]:
        """List each change to another plan in order."""
        told: list[Told[OutOfMemoryEvent | PlanClimbedEvent]]
        told = [*self.out_of_memory, *self.climbs]
        changed = [entry for entry in told if entry.event.plan != entry.event.next_plan]
        return sorted(changed, key=lambda entry: entry.event.step)

    def to_json(self) -> dict[str, Any]:
        """Return the summary as plain values, without the single steps."""
        top = self.highest_rank
        return {
            "folder": str(self.folder),
            "title": self.title,
            "run": None if self.facts is None else asdict(self.facts),
            "state": self.state.value,
            "reason": self.ending.reason.value if self.ending else None,
            "ending": None if self.ending is None else asdict(self.ending),
            "written_at": self.written_at,
            "num_steps": self.num_steps,
            "seconds": max(rank.seconds for rank in self.ranks),
            "median_step_seconds": top.median_step_seconds,
            "peak_allocated_bytes": top.peak_allocated_bytes,
            "peak_reserved_bytes": _highest(rank.peak_reserved_bytes for rank in self.ranks),
            "predicted_peak_bytes": top.predicted_peak_bytes,
            "host_peak_bytes": _highest(rank.host_peak_bytes for rank in self.ranks),
            "budget_bytes": self.budget_bytes,
            "strategies": list(self.begun_with),
            "plan": None if self.plan is None else asdict(self.plan),
            "out_of_memory": _told_json(self.out_of_memory),
            "climbs": _told_json(self.climbs),
            "drifts": _told_json(self.drifts),
            "leaks": _told_json(self.leaks),
            "ranks": [{**asdict(rank), "state": rank.state.value} for rank in self.ranks],
            "notes": list(self.notes),
        }


def _title_of(facts: RunFacts) -> str:
    """Name a run by its script with the words after it, where only the script's name was noted.

    A script's name alone is `train` in most folders.
    """
    words = facts.command.split()
    for index, word in enumerate(words):
        path = Path(word)
        if facts.title in (path.name, path.stem, word.rpartition(".")[2]):
            name = path.parent.name if path.stem == "__main__" else path.name
            title = " ".join((name, *words[index + 1 :]))
            return textwrap.shorten(title, _LONGEST_TITLE, placeholder=" ...")
    return facts.title


def read_report(folder: Path) -> RunReport:
    """Read a run folder, also of a run that is going on or was killed.

    Raises:
        DataError: if no run has written a journal there, or a file of it cannot be read.
    """
    _check_holds_run(folder)
    journals = read_ranks(folder)
    told = {rank: journal.events for rank, journal in journals.items()}
    leaks = {rank: _leaks(journal) for rank, journal in journals.items()}
    out_of_memory = _once(_of_kind(OutOfMemoryEvent, told))
    first = journals[min(journals)]
    ending = _ending(journals)
    notes: list[str] = []
    training = _readable(read_training, folder, notes)
    budget_bytes = first.facts.budget_bytes if first.facts else None
    if budget_bytes is None and ending is not None:
        budget_bytes = ending.budget_bytes
    return RunReport(
        folder=folder,
        facts=first.facts,
        state=State.ENDED if ending is not None else state_of(first.facts),
        ending=ending,
        written_at=_written_at(journals.values()),
        budget_bytes=budget_bytes,
        ranks=tuple(
            _summary(
                rank,
                journal,
                num_leaks=len(leaks[rank]),
                num_out_of_memory=sum(entry.event.rank == rank for entry in out_of_memory),
            )
            for rank, journal in journals.items()
        ),
        steps={rank: journal.steps for rank, journal in journals.items()},
        out_of_memory=out_of_memory,
        climbs=_once(_of_kind(PlanClimbedEvent, told)),
        drifts=_of_kind(DriftEvent, told),
        leaks=tuple(sorted(_of_kind(LeakEvent, leaks), key=_worst_first)),
        plan=_readable(_known_plan, folder, notes),
        timeline=_readable(read_timeline, folder, notes),
        training=training,
        metrics=read_metrics(folder) if training is not None else (),
        notes=tuple(notes),
    )


def _check_holds_run(folder: Path) -> None:
    """Refuse a folder without a journal, and say what to do instead.

    Raises:
        DataError: if there is none.
    """
    if not folder.is_dir():
        raise DataError(str(folder), "there is no such folder")
    if holds_journal(folder) or any(map(holds_journal, folder.glob("rank-*"))):
        return
    runs = sorted(path.parent for path in folder.glob(f"*/{FACTS_NAME}"))
    if runs:
        named = ", ".join(str(path) for path in runs[-_MOST_NAMED:])
        raise DataError(str(folder), f"it is not a run, but holds some: {named}. Name one.")
    raise DataError(str(folder), f"{NO_JOURNAL}.")


def _leaks(journal: Journal) -> Sequence[LeakEvent]:
    """List what was found to leak, the latest word on each holder."""
    found = [event for event in journal.events if isinstance(event, LeakEvent)]
    found += journal.ending.leaks if journal.ending else ()
    return list({(leak.place, leak.kind, leak.holder): leak for leak in found}.values())


def _worst_first(told: Told[LeakEvent]) -> tuple[float, int]:
    """Order leaks by their growth per step; what one that was found early has in all is little."""
    return -told.event.growth_bytes_per_step, -told.event.total_growth_bytes


def _of_kind(kind: type[_E], told: Mapping[int, Iterable[Event]]) -> tuple[Told[_E], ...]:
    return tuple(
        Told(rank=rank, event=event)
        for rank, events in told.items()
        for event in events
        if isinstance(event, kind)
    )


def _once(told: Iterable[Told[_P]]) -> tuple[Told[_P], ...]:
    """Keep one of the events that every rank has noted: they change plans together."""
    kept: dict[tuple[object, ...], Told[_P]] = {}
    for entry in told:
        event = entry.event
        whose = event.rank if isinstance(event, OutOfMemoryEvent) else 0
        kept.setdefault((event.step, whose, event.plan, event.next_plan), entry)
    return tuple(sorted(kept.values(), key=lambda entry: entry.event.step))


def _ending(journals: Mapping[int, Journal]) -> Ending | None:
    """Return how the run ended: as its first rank says, unless another one has worse to tell."""
    endings = [journal.ending for journal in journals.values() if journal.ending is not None]
    worse = [ending for ending in endings if ending.reason is not Reason.DONE]
    if endings and endings[0].reason is Reason.DONE and worse:
        return worse[0]
    return endings[0] if endings else None


def _written_at(journals: Iterable[Journal]) -> str:
    paths = [journal.folder / name for journal in journals for name in JOURNAL_NAMES]
    latest = max(path.stat().st_mtime for path in paths if path.exists())
    return datetime.fromtimestamp(latest, tz=UTC).astimezone().isoformat(timespec="seconds")


def _summary(rank: int, journal: Journal, *, num_leaks: int, num_out_of_memory: int) -> RankSummary:
    steps, ending = journal.steps, journal.ending
    allocated = _highest(step.peak_allocated_bytes for step in steps)
    host = _highest(step.host_bytes for step in steps)
    if ending is not None:
        allocated = _highest((allocated, ending.peak_allocated_bytes))
        host = _highest((host, ending.host_peak_bytes))
    return RankSummary(
        rank=rank,
        state=State.ENDED if ending is not None else state_of(journal.facts),
        ending=ending,
        num_steps=max(sum(step.num_steps for step in steps), ending.num_steps if ending else 0),
        last_step=steps[-1].step if steps else 0,
        seconds=steps[-1].time_seconds if steps else 0.0,
        median_step_seconds=_median_step_seconds(steps),
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=_highest(step.peak_reserved_bytes for step in steps),
        predicted_peak_bytes=_predicted_bytes(steps),
        host_peak_bytes=host,
        allocator_retries=_highest(step.allocator_retries for step in steps),
        num_out_of_memory=num_out_of_memory,
        num_leaks=num_leaks,
    )


def _median_step_seconds(steps: Sequence[StepRecord]) -> float | None:
    """Return the step's time that half of all steps are below; None without steps."""
    if all(step.num_steps == 1 for step in steps):
        return statistics.median(step.step_seconds for step in steps) if steps else None
    remaining = sum(step.num_steps for step in steps) / 2
    for step in sorted(steps, key=lambda step: step.step_seconds):
        remaining -= step.num_steps
        if remaining <= 0:
            break
    return step.step_seconds


def _predicted_bytes(steps: Sequence[StepRecord]) -> int | None:
    """Return what was predicted for the highest step; without a measured one, for the last."""
    both = [
        (step.peak_allocated_bytes, step.predicted_peak_bytes)
        for step in steps
        if step.peak_allocated_bytes is not None and step.predicted_peak_bytes is not None
    ]
    if both:
        return max(both)[1]
    predicted = [s.predicted_peak_bytes for s in steps if s.predicted_peak_bytes is not None]
    return predicted[-1] if predicted else None


def _highest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _readable(read: Callable[[Path], _T | None], folder: Path, notes: list[str]) -> _T | None:
    """Read a file beside the journal; one that cannot be read is noted, and the rest is shown."""
    try:
        return read(folder)
    except (DataError, PlanFileError) as error:
        notes.append(str(error))
        return None


def _known_plan(folder: Path) -> KnownPlan | None:
    path = folder / PLAN_NAME
    if not path.exists():
        return None
    if (known := read_plan_words(folder)) is not None:
        return known
    from memfit.strategies.plan import Plan  # it needs torch, which reading a journal does not

    return Plan.load(path).in_words()


def _told_json(told: Iterable[Told[Any]]) -> list[dict[str, Any]]:
    return [{"rank": entry.rank, **asdict(entry.event)} for entry in told]
