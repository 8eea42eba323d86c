"""The words for how a run stands, the same on its page and in the terminal."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.journal.records import Ending, Reason
from memfit.units import format_bytes, format_seconds

from .page import TONES, Headline
from .run_contents import RankSummary, RunReport
from .run_state import State
from .training import Training
from .wording import FIGURE_NAMES, fits_sentence, is_within, percent, signed_error

REASON_WORDS = {
    Reason.DONE: "Done",
    Reason.LEAK: "A leak used up the memory",
    Reason.BUDGET_EXCEEDED: "Over the budget",
    Reason.OUT_OF_MEMORY: "Out of memory",
    Reason.HOST_OUT_OF_MEMORY_KILLER: "Killed by the host",
    Reason.LOST_CONTEXT: "The card was lost",
    Reason.SIGNAL: "Killed by a signal",
    Reason.INTERRUPTED: "Interrupted",
    Reason.ERROR: "Ended by an error",
}
STATE_WORDS = {
    State.GOING_ON: "Still running",
    State.GONE: "Ended without a word",
    State.UNKNOWN: "No ending yet",
}
_WHERE_MEMORY_ENDED = {
    Reason.OUT_OF_MEMORY.value: "",
    Reason.BUDGET_EXCEEDED.value: " at the enforced budget",
    Reason.HOST_OUT_OF_MEMORY_KILLER.value: " on the host",
}
_WHEN_GONE = (
    "Something killed it, or the machine went down. Look for the out-of-memory killer in the "
    "system's log; `memfit run` watches for it."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a run stands: in a few words, in a sentence, and what to do."""

    words: str
    sentence: str
    remedy: str
    evidence: tuple[str, ...]
    tone: str
    """``good``, ``warn``, ``bad``, or empty."""


def verdict(report: RunReport) -> Verdict:
    """Return how a run stands."""
    if report.ending is None:
        return _open_verdict(report)
    return Verdict(
        words=_ended_words(report.ending, num_leaks=len(report.leaks)),
        sentence=report.ending.sentence,
        remedy=report.ending.remedy,
        evidence=report.ending.evidence,
        tone=_tone(report.ending, num_leaks=len(report.leaks)),
    )


def _ended_words(ending: Ending, *, num_leaks: int) -> str:
    """Write how a run ended; one that came to its end while something leaked is not just done."""
    words = REASON_WORDS[ending.reason]
    if ending.reason is not Reason.DONE or not num_leaks:
        return words
    return f"{words}, but {num_leaks:,} {'leak was' if num_leaks == 1 else 'leaks were'} found"


def _tone(ending: Ending, *, num_leaks: int) -> str:
    if ending.reason is Reason.DONE:
        return "warn" if num_leaks else "good"
    return "" if ending.reason is Reason.INTERRUPTED else "bad"


def _open_verdict(report: RunReport) -> Verdict:
    """Return how a run stands that has not said how it ended."""
    process = f"process {report.facts.process_id}" if report.facts else "its process"
    at = report.written_at.replace("T", " ")
    last = f"The last step is {max(rank.last_step for rank in report.ranks):,}"
    if not any(rank.num_steps for rank in report.ranks):
        last = "There is no step"
    last = f"{last}, and the journal was last written at {at}."
    sentences = {
        State.GOING_ON: f"{process} is there. {last}",
        State.GONE: f"No ending was written, and {process} is not there any more. {last}",
        State.UNKNOWN: f"Whether {process} is there cannot be told here. {last}",
    }
    sentence, is_gone = sentences[report.state], report.state is State.GONE
    return Verdict(
        words=STATE_WORDS[report.state],
        sentence=sentence[0].upper() + sentence[1:],
        remedy=_WHEN_GONE if is_gone else "",
        evidence=(),
        tone="bad" if is_gone else "",
    )


def budget_verdict(training: Training) -> tuple[str, str]:
    """Return the tone and the sentence of a training's budget; measured overrules predicted."""
    planned, budget_bytes, found = training.planned, training.budget_bytes, training.found_bytes
    if not found or budget_bytes is None:
        return TONES[is_within(planned, budget_bytes)], fits_sentence(planned, budget_bytes)
    is_kept = found <= budget_bytes
    went, rest = ("stayed within", "to spare") if is_kept else ("went above", "too much")
    return TONES[is_kept], (
        f"The run {went} the budget of {format_bytes(budget_bytes)}: measured "
        f"{FIGURE_NAMES[planned.budget_of]} {format_bytes(found)}, "
        f"{format_bytes(abs(budget_bytes - found))} {rest}; predicted "
        f"{format_bytes(planned.bounded_bytes())}."
    )


def headline_cards(report: RunReport) -> list[Headline]:
    """Choose the headline numbers."""
    return [
        _ended_card(report),
        _peak_card(report),
        _budget_card(report),
        _steps_card(report),
        _out_of_memory_card(report),
        _leaks_card(report),
    ]


def _ended_card(report: RunReport) -> Headline:
    found = verdict(report)
    notes = []
    if report.ending is not None:
        notes.append(f"exit code {report.ending.exit_code}")
        if report.ending.ended_by not in ("", report.ending.reason.value):
            notes.append(f"then: {_ended_by_words(report.ending.ended_by)}")
    is_open = report.state in (State.GOING_ON, State.UNKNOWN)
    label = "State" if is_open else "Ended"
    return Headline(label=label, value=found.words, notes=tuple(notes), tone=found.tone)


def _ended_by_words(ended_by: str) -> str:
    """Write what a leak led to; a word that this version does not know stays as it is."""
    words = REASON_WORDS.get(Reason(ended_by)) if ended_by in set(Reason) else None
    return words.lower() if words else ended_by


def _peak_card(report: RunReport) -> Headline:
    rank, peak_bytes = report.highest_rank, report.peak_allocated_bytes
    notes = [_predicted_words(rank.predicted_peak_bytes, peak_bytes)]
    if rank.peak_reserved_bytes is not None:
        notes.append(f"reserved {format_bytes(rank.peak_reserved_bytes)}")
    if peak_bytes is None:
        return Headline(label="Peak allocated", value="not measured", notes=tuple(notes))
    over = report.budget_bytes is not None and peak_bytes > report.budget_bytes
    return Headline(
        label="Peak allocated",
        value=format_bytes(peak_bytes),
        notes=tuple(notes),
        tone="bad" if over else "",
    )


def _predicted_words(predicted_bytes: int | None, peak_bytes: int | None) -> str:
    """Write the predicted peak, with its error where one was measured."""
    if predicted_bytes is None:
        return "not predicted"
    predicted = f"predicted {format_bytes(predicted_bytes)}"
    if peak_bytes is None:
        return predicted
    return f"{predicted} ({signed_error(predicted_bytes, peak_bytes)})"


def _budget_card(report: RunReport) -> Headline:
    if report.budget_bytes is None:
        return Headline(label="Budget", value="none", notes=("nothing was enforced",))
    peak_bytes = report.peak_allocated_bytes
    used = () if peak_bytes is None else (f"{percent(peak_bytes, report.budget_bytes)} of it used",)
    is_over = report.ending is not None and report.ending.ended_by == Reason.BUDGET_EXCEEDED
    return Headline(
        label="Budget",
        value=format_bytes(report.budget_bytes),
        notes=(*used, "then exceeded") if is_over else used,
        tone="bad" if is_over else "",
    )


def _steps_card(report: RunReport) -> Headline:
    rank = max(report.ranks, key=lambda entry: entry.num_steps)
    notes = [f"in {format_seconds(rank.seconds)}"] if rank.seconds else []
    if rank.median_step_seconds is not None:
        notes.append(f"median {format_seconds(rank.median_step_seconds)}")
    return Headline(label="Steps", value=f"{rank.num_steps:,}", notes=tuple(notes))


def _out_of_memory_card(report: RunReport) -> Headline:
    count = len(report.out_of_memory)
    where = None if report.ending is None else _WHERE_MEMORY_ENDED.get(report.ending.ended_by)
    notes = ["each time run again"] if count else []
    if report.climbs:
        notes.append(f"a larger plan tried again {_times(len(report.climbs))}")
    if where is not None and count:
        notes.append(f"once more{where}, which ended the run")
    elif where:
        notes.append(where.strip())
    return Headline(
        label="Out of memory",
        value=_times(count) if count else "never" if where is None else "ended the run",
        notes=tuple(notes),
        tone="warn" if count and where is None else "" if where is None else "bad",
    )


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count:,} times")


def _leaks_card(report: RunReport) -> Headline:
    if not report.leaks:
        is_off = report.facts is not None and report.facts.finds_leaks is False
        return Headline(label="Leaks", value="not looked for" if is_off else "none found", notes=())
    worst = report.leaks[0].event
    return Headline(
        label="Leaks",
        value=f"{len(report.leaks):,} found",
        notes=(worst.holder, f"{format_bytes(worst.total_growth_bytes)} in all"),
        tone="bad" if report.ending and report.ending.reason is Reason.LEAK else "warn",
    )


def rank_row(rank: RankSummary) -> list[str]:
    """Write what is known of a rank, cell by cell."""
    ended = STATE_WORDS.get(rank.state, "")
    if rank.ending is not None:
        ended = REASON_WORDS[rank.ending.reason]
    sizes = (rank.peak_allocated_bytes, rank.peak_reserved_bytes, rank.host_peak_bytes)
    seconds = rank.median_step_seconds
    return [
        str(rank.rank),
        ended,
        f"{rank.num_steps:,}",
        "-" if seconds is None else format_seconds(seconds),
        *("-" if size is None else format_bytes(size) for size in sizes),
        "-" if rank.allocator_retries is None else f"{rank.allocator_retries:,}",
        f"{rank.num_out_of_memory:,}",
        f"{rank.num_leaks:,}",
    ]
