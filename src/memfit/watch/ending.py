"""Tells why a command ended, from everything that was seen of it; computes on data alone."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.journal.folder import Journal
from memfit.journal.records import Ending, LeakEvent, Reason
from memfit.units import format_bytes

from .last_words import ErrorWords, LastWords
from .supervisor import CommandEnd

_OF_MEMORY = (Reason.BUDGET_EXCEEDED, Reason.OUT_OF_MEMORY, Reason.LOST_CONTEXT)
_ASKED_TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ACCOUNTABLE_FRACTION = 0.1
"""A leak that has taken less of the memory than this is not what it ran out by."""
_LEAST_CODE_OF_SIGNAL = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """All that was seen of a command."""

    end: CommandEnd
    words: tuple[LastWords, ...] = ()
    """Of each process that imported torch."""
    failures: tuple[str, ...] = ()
    """Why processes could not be watched."""
    journals: Mapping[int, Journal]
    """By rank."""
    killer_signs: tuple[str, ...] = ()
    budget_bytes: int | None = None
    is_disabled: bool = False
    fit: Mapping[str, Any] | None = None
    """What trainings inside were to be planned with."""
    ended_afterwards: tuple[int, ...] = ()
    """Processes that had outlived the command."""

    @property
    def unplanned(self) -> str:
        """Return why a training was not planned that was to be; empty where all were."""
        if self.fit is None:
            return ""
        told = [words.unplanned for words in self.words if words.unplanned]
        if not told and not any(words.is_planned for words in self.words):
            return "no training was seen that could be planned"
        return " ".join(told[:1])

    @property
    def is_refused(self) -> bool:
        """Return whether a training was ended as it is not planned."""
        is_told = any(words.unplanned for words in self.words)
        return bool(self.fit and self.fit["refuses"] and is_told)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cause:
    """What ended the command in the first place."""

    reason: Reason
    sentence: str
    remedy: str = ""
    evidence: tuple[str, ...] = ()
    error: ErrorWords | None = None
    signal_number: int | None = None


def ending_of(seen: Seen) -> Ending:
    """Tell why a command ended."""
    cause = _cause(seen)
    leaks = tuple(_leaks(seen))
    reason, sentence, remedy = cause.reason, cause.sentence, cause.remedy
    is_leak = reason in _ENDS_OF_LEAKS and _accounts(leaks, cause, seen)
    if is_leak:
        worst = max(leaks, key=lambda leak: leak.total_growth_bytes)
        reason, sentence = Reason.LEAK, f"{worst.sentence} It ended so: {cause.sentence}"
        place = f" at {worst.source_line}" if worst.source_line else ""
        remedy = f"End the growth of {worst.holder}{place}; then see whether the job fits."
    return Ending(
        reason=reason,
        ended_by=cause.reason.value,
        exit_code=seen.end.exit_code or int(seen.is_refused),
        is_planned=None if seen.fit is None else not seen.unplanned,
        unplanned=seen.unplanned,
        sentence=sentence,
        remedy=remedy,
        evidence=(*cause.evidence, *_unseen(seen)),
        num_steps=_num_steps(seen),
        peak_allocated_bytes=_peak_bytes(seen),
        host_peak_bytes=seen.end.host_peak_bytes or None,
        budget_bytes=seen.budget_bytes,
        leaks=leaks,
        signal=cause.signal_number,
    )


_ENDS_OF_LEAKS = (
    Reason.BUDGET_EXCEEDED,
    Reason.OUT_OF_MEMORY,
    Reason.HOST_OUT_OF_MEMORY_KILLER,
)


# --- The cause ---


def _cause(seen: Seen) -> _Cause:
    if seen.is_refused:
        return _Cause(
            reason=Reason.ERROR,
            sentence=f"Nothing was trained without a plan: {seen.unplanned}",
            remedy="Give a larger --budget, or --allow-unplanned to train without a plan.",
        )
    asked = next((number for number in seen.end.received if number in _ASKED_TO_END), None)
    if seen.end.exit_code == 0 and asked is None:
        num_steps = _num_steps(seen)
        ending = "" if num_steps == 1 else "s"
        steps = f" after {num_steps} step{ending}" if num_steps else ""
        return _Cause(reason=Reason.DONE, sentence=f"The command came to its end{steps}.")
    candidates = (
        _memory_failure(seen),
        _killer(seen),
        None if asked is None else _interrupted(seen, asked),
        _signal(seen),
    )
    return next((cause for cause in candidates if cause is not None), None) or _error(seen)


def _memory_failure(seen: Seen) -> _Cause | None:
    """Find the first memory error: others may follow from it, also in other ranks."""
    if seen.end.exit_code == 0:
        return None
    errors = [(error, words) for words in seen.words for error in words.errors]
    fatal = [each for each in errors if each[0].failure in _OF_MEMORY]
    if not fatal:
        return None
    # One that the script caught may have been dealt with; one that it let pass was not. What a
    # parent hands on says less than what the process itself noted.
    error, words = min(
        fatal,
        key=lambda e: (e[0].is_handed_on, not e[0].is_uncaught, e[0].noted_at_seconds),
    )
    reason = error.failure
    is_caught = not any(each.is_uncaught for each, _ in fatal)
    caught = ("the script caught the error, and ended with it",) if is_caught else ()
    return _Cause(
        reason=reason,
        sentence=_memory_sentence(reason, error, seen.budget_bytes),
        remedy=_REMEDIES[reason],
        evidence=(f"{_who(words)} noted {error.type_name}: {error.message}", *caught),
        error=error,
    )


def _memory_sentence(reason: Reason, error: ErrorWords, budget_bytes: int | None) -> str:
    where = _where(error)
    if reason is Reason.LOST_CONTEXT:
        return f"The card could not be used any more{where}: {error.message}"
    if reason is Reason.BUDGET_EXCEEDED and error.wanted_bytes is not None:
        budget = format_bytes(budget_bytes or 0)
        live = format_bytes(error.live_bytes or 0)
        return (
            f"{error.operator} wanted {format_bytes(error.wanted_bytes)} beside {live}, over the "
            f"enforced budget of {budget}{where}."
        )
    return f"Memory ran out{where}: {error.message}"


def _where(error: ErrorWords) -> str:
    parts = [f", in {error.module}" if error.module else ""]
    parts += [f", in the {error.phase} of step {error.step + 1}" if error.phase else ""]
    parts += [f", at {error.place}" if error.place else ""]
    parts += [f", in thread {error.thread}" if error.thread else ""]
    return "".join(parts)


_REMEDIES = {
    Reason.BUDGET_EXCEEDED: "`memfit plan` finds settings that fit a budget and keep the results; "
    "or give a larger --budget.",
    Reason.OUT_OF_MEMORY: "`memfit plan` finds settings that fit the memory there is and keep the "
    "results.",
    Reason.LOST_CONTEXT: "Continue from a checkpoint in a new process. CUDA_LAUNCH_BLOCKING=1 "
    "shows the operator that did it.",
    Reason.HOST_OUT_OF_MEMORY_KILLER: "Give the job more memory, or let it hold less: smaller "
    "batches, fewer workers of data loaders, `memfit plan` with --host-memory.",
    Reason.SIGNAL: "Nothing says who sent it: look for a scheduler's time limit, a supervisor, or "
    "somebody's kill.",
}


def _killer(seen: Seen) -> _Cause | None:
    number, who = _killed_by(seen)
    silent = _silent(seen)
    is_possible = number == signal.SIGKILL or (number is None and bool(silent))
    if not is_possible or not seen.killer_signs:
        return None
    who = who or _named(silent)
    resident = format_bytes(seen.end.last_sample.resident_bytes)
    return _Cause(
        reason=Reason.HOST_OUT_OF_MEMORY_KILLER,
        sentence=f"The host ran out of memory and its out-of-memory killer ended {who}; "
        f"{resident} were resident at the last look.",
        remedy=_REMEDIES[Reason.HOST_OUT_OF_MEMORY_KILLER],
        evidence=seen.killer_signs,
        signal_number=int(signal.SIGKILL),
    )


def _interrupted(seen: Seen, asked: int) -> _Cause:
    name = signal.Signals(asked).name
    return _Cause(
        reason=Reason.INTERRUPTED,
        sentence=f"The command was asked to end ({name}), and ended with exit code "
        f"{seen.end.exit_code}.",
        remedy="Continue from what the script has saved, or start it again.",
        evidence=(f"{name} came while the command ran",),
        signal_number=seen.end.signal_number,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # those of real time have no names
        return f"signal {number}"


def _signal(seen: Seen) -> _Cause | None:
    number, who = _killed_by(seen)
    if number is None:
        return None
    name = _signal_name(number)
    evidence: tuple[str, ...] = (f"{name} ended {who}",)
    if number == signal.SIGKILL:
        evidence = (*evidence, "no sign of the host's out-of-memory killer was found")
    remedy = "" if number == signal.SIGINT else _REMEDIES[Reason.SIGNAL]
    if number in _FAULTS:
        remedy = "It is a fault in native code: PYTHONFAULTHANDLER=1 shows where."
    reason = Reason.INTERRUPTED if number == signal.SIGINT else Reason.SIGNAL
    return _Cause(
        reason=reason,
        sentence=f"{name} ended {who}.",
        remedy=remedy,
        evidence=evidence,
        signal_number=number,
    )


_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)


def _killed_by(seen: Seen) -> tuple[int | None, str]:
    """Find the signal that killed the command, or a process below it of which others told."""
    if seen.end.signal_number is not None:
        return seen.end.signal_number, "the command"
    below = _named(_silent(seen))
    for error in (error for words in seen.words for error in words.errors):
        if error.child_signal is not None:
            killed = [words for words in seen.words if words.process_id in error.child_ids]
            return error.child_signal, _named(killed) if killed else below
    number = seen.end.exit_code - _LEAST_CODE_OF_SIGNAL
    if number in {*map(int, signal.Signals)} and not _has_uncaught(seen):
        return number, below  # as shells say it with their own exit code
    return None, ""


def _error(seen: Seen) -> _Cause:
    code = seen.end.exit_code
    found = [(e, words) for words in seen.words for e in words.errors if e.is_uncaught]
    silent = tuple(f"{_who(words)} ended without a word" for words in _silent(seen))
    if not found:
        return _Cause(
            reason=Reason.ERROR,
            sentence=f"The command ended with exit code {code}.",
            remedy="Read what it wrote last.",
            evidence=silent,
        )
    error, words = min(found, key=lambda each: each[0].noted_at_seconds)
    return _Cause(
        reason=Reason.ERROR,
        sentence=f"{error.type_name}{_where(error)}: {error.message}",
        remedy="Read the traceback that the command wrote.",
        evidence=(f"{_who(words)} noted it; exit code {code}", *silent),
        error=error,
    )


def _has_uncaught(seen: Seen) -> bool:
    return any(error.is_uncaught for words in seen.words for error in words.errors)


def _silent(seen: Seen) -> list[LastWords]:
    """Return the processes that trained and came to no orderly end."""
    return [words for words in seen.words if words.rank is not None and not words.has_ended]


def _named(processes: Sequence[LastWords]) -> str:
    return ", ".join(_who(words) for words in processes) or "a process below the command"


def _who(words: LastWords) -> str:
    rank = "" if words.rank is None else f"rank {words.rank}, "
    return f"{rank}process {words.process_id}"


# --- What was seen on the way ---


def _unseen(seen: Seen) -> Iterator[str]:
    """Yield what could not be seen, so that silence is not taken for health."""
    if seen.is_disabled:
        yield "MEMFIT_DISABLE=1: nothing was attached"
    elif not seen.words and not seen.failures:
        yield (
            "nothing was seen of the inside: no Python process below the command imported torch, "
            "or it does not read PYTHONPATH (python -I, -E and -S)"
        )
    elif not any(words.rank is not None for words in seen.words):
        yield "no step of an optimizer of torch was seen"
    for rank, journal in sorted(seen.journals.items()):
        measured = [step for step in journal.steps if step.peak_allocated_bytes is not None]
        num_steps = sum(step.num_steps for step in journal.steps)
        # The first step is no loss: it begins before there is anything to measure.
        if len(measured) < num_steps - 1:
            of_rank = f" of rank {rank}" if len(seen.journals) > 1 else ""
            # Of several steps that were rolled up, it is not kept in how many.
            at_least = "at least " if any(step.num_steps > 1 for step in measured) else ""
            yield (
                f"the peak was measured in {at_least}{len(measured)} of {num_steps} steps{of_rank};"
                " evaluation and checkpoints between the others are not measured"
            )
    for process_id in seen.ended_afterwards:
        yield f"process {process_id} had outlived the command and was ended"
    for failure in seen.failures:
        yield f"a process could not be watched: {failure}"
    yield from dict.fromkeys(note for words in seen.words for note in words.notes)


def _leaks(seen: Seen) -> Iterator[LeakEvent]:
    for rank in sorted(seen.journals):
        for event in seen.journals[rank].events:
            if isinstance(event, LeakEvent):
                yield event


def _num_steps(seen: Seen) -> int:
    return max((j.steps[-1].step for j in seen.journals.values() if j.steps), default=0)


def _peak_bytes(seen: Seen) -> int | None:
    """Return the highest peak of any step of any rank; of one that was not finished if none was."""
    peaks = [
        step.peak_allocated_bytes
        for journal in seen.journals.values()
        for step in journal.steps
        if step.peak_allocated_bytes is not None
    ]
    peaks += [words.highest_bytes for words in seen.words if words.highest_bytes]
    return max(peaks, default=None)


def _accounts(leaks: Sequence[LeakEvent], cause: _Cause, seen: Seen) -> bool:
    """Return whether there would have been room enough without what leaked."""
    leaked_bytes = sum(_leaked_bytes(leak, _num_steps(seen)) for leak in leaks)
    error = cause.error
    if error is not None and error.wanted_bytes is not None and seen.budget_bytes is not None:
        excess_bytes = (error.live_bytes or 0) + error.wanted_bytes - seen.budget_bytes
        return 0 < excess_bytes <= leaked_bytes
    used_bytes = max(seen.end.last_sample.resident_bytes, _peak_bytes(seen) or 0)
    if cause.reason is not Reason.HOST_OUT_OF_MEMORY_KILLER:
        used_bytes = _peak_bytes(seen) or used_bytes
    return leaked_bytes > _ACCOUNTABLE_FRACTION * used_bytes


def _leaked_bytes(leak: LeakEvent, num_steps: int) -> float:
    """Return what a leak has taken by the end; it went on after it was found."""
    since = max(0, num_steps - leak.step)
    return leak.total_growth_bytes + since * leak.growth_bytes_per_step


def leak_line(leak: LeakEvent) -> str:
    """Name a leak in one line."""
    place = f", made at {leak.source_line}" if leak.source_line else ""
    per_step = format_bytes(leak.growth_bytes_per_step)
    return f"{leak.holder} ({leak.kind}) grows by {per_step} a step{place}"


def script_name(words: Sequence[str]) -> str:
    """Name a command by the script in it: the first Python or shell file, a module, or itself."""
    for word in " ".join(words).split():  # also within the text of `sh -c`
        if word.endswith((".py", ".sh", ".bash")):
            return Path(word).stem
    if "-m" in words[:-1]:
        after = list(words[words.index("-m") + 1 :])
        return after[0].rpartition(".")[2]
    return Path(words[0]).stem
