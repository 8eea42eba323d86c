"""What the predictions are worth: errors, coverage of the stated intervals, and wrong verdicts.

Process bytes are predicted reserved bytes plus a constant for what lies outside the allocator. The
constant of a row comes from rows of other models alone, so no row is predicted with its own
reading, nor with that of its model.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from memfit.devices.nccl import nccl_memory
from memfit.figures import Interval
from memfit.prediction.peak_range import PeakRange
from memfit.prediction.process_memory import process_range

from .cards import card_of_row
from .rows import Row
from .scoring import Predicted

QUANTITIES = ("allocated", "reserved", "process")
BUDGET_FRACTIONS = (0.9, 0.95, 1.05, 1.1)
"""Budgets that a row's reading is held against, as fractions of that reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A row, and what was predicted of it or why nothing was."""

    row: Row
    predicted: Predicted | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One predicted quantity of one row."""

    predicted_bytes: int
    interval: Interval
    measured_bytes: int | None
    peak: PeakRange | None = None
    """What the interval follows from; None of what was read back from older results."""

    @property
    def error(self) -> float | None:
        """Return predicted / measured - 1; None where nothing was measured."""
        return self.predicted_bytes / self.measured_bytes - 1 if self.measured_bytes else None

    @property
    def is_covered(self) -> bool | None:
        """Return whether the reading lies in the stated interval; None where there is none."""
        if not self.measured_bytes:
            return None
        return self.interval.low_bytes <= self.measured_bytes <= self.interval.high_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One answer to the question whether a row's step fits a limit."""

    kind: str
    """``budget``: a fraction of the reading; ``card``: its memory; ``cap``: a limit under which the
    authors ran the step again; ``oom``: the card's memory where the authors' run failed."""
    limit_bytes: int
    says_fits: bool
    fits: bool
    is_uncertain: bool
    """Whether the limit lies inside the stated interval."""

    @property
    def is_wrong(self) -> bool:
        """Return whether the answer is wrong, however uncertain it calls itself."""
        return self.says_fits != self.fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A row's figures and verdicts; none where it could not be predicted."""

    row: Row
    predicted: Predicted | None = None
    failure: str | None = None
    context_bytes: int = 0
    context_rows: int = 0
    """Rows of other models behind the constant; 0 where it is the catalogue's."""
    figures: Mapping[str, Figure] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The errors of one quantity over the rows of one source, as fractions."""

    source: str
    quantity: str
    rows: int
    median_abs_error: float | None
    p95_abs_error: float | None
    worst_abs_error: float | None
    mean_signed_error: float | None
    coverage: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextReading:
    """What a process of an earlier scored row held besides reserved memory."""

    id: str
    source: str
    device: str
    torch_version: str
    model: str
    num_bytes: int


def score_all(answers: Sequence[Answer], known: Sequence[ContextReading] = ()) -> tuple[Score, ...]:
    """Turn predictions into figures and verdicts; ``known`` are readings of rows scored before."""
    own_ids = {answer.row.id for answer in answers}
    others = [reading for reading in known if reading.id not in own_ids]
    return tuple(_score(answer, answers, others) for answer in answers)


def _score(answer: Answer, answers: Sequence[Answer], known: Sequence[ContextReading]) -> Score:
    row, predicted = answer.row, answer.predicted
    if predicted is None:
        return Score(row=row, failure=answer.failure)
    if row.published:
        process, num_rows = _as_a_user_is_told(row, predicted), 0
        context_bytes = process.likely_bytes - predicted.reserved.likely_bytes
    else:
        context_bytes, num_rows = fitted_context(answer, answers, known)
        process = predicted.reserved.plus(context_bytes)
    ranges = {"allocated": predicted.allocated, "reserved": predicted.reserved, "process": process}
    figures = {name: _figure(name, each, row) for name, each in ranges.items()}
    return Score(
        row=row,
        predicted=predicted,
        context_bytes=context_bytes,
        context_rows=num_rows,
        figures=figures,
        verdicts=tuple(_verdicts(row, predicted, figures, context_bytes)),
    )


def _as_a_user_is_told(row: Row, predicted: Predicted) -> PeakRange:
    """Add what the catalogue has of contexts and of NCCL: rows of the collection have no constant.

    Most of them do not tell what was reserved, so what lies outside cannot be read off others.
    """
    device = card_of_row(row)
    nccl = nccl_memory(device, (row.ranks,))
    return process_range(predicted.reserved, device.facts["context_bytes"], nccl)


def _figure(name: str, peak: PeakRange, row: Row) -> Figure:
    return Figure(
        predicted_bytes=peak.likely_bytes,
        interval=peak.interval(name),
        measured_bytes=getattr(row.measured, f"{name}_bytes"),
        peak=peak,
    )


def fitted_context(
    answer: Answer, answers: Iterable[Answer], known: Iterable[ContextReading] = ()
) -> tuple[int, int]:
    """Return what lies outside the allocator, and from how many rows of other models it was read.

    It is the median over the rows of the same source, device and torch version. Without any it is
    the catalogue's guess, from 0 rows.
    """
    assert answer.predicted is not None, "only a predicted row has a device"
    readings = [
        reading
        for other in answers
        if _is_alike(other.row, answer.row) and other.row.model != answer.row.model
        and (reading := _outside_allocator(other)) is not None
    ]  # fmt: skip
    readings += [
        reading.num_bytes
        for reading in known
        if _is_alike(reading, answer.row) and reading.model != answer.row.model
    ]
    if not readings:
        return answer.predicted.context_bytes, 0
    return max(0, round(statistics.median(readings))), len(readings)


def _is_alike(one: Row | ContextReading, other: Row) -> bool:
    keys = ("source", "device", "torch_version")
    return all(getattr(one, key) == getattr(other, key) for key in keys)


def _outside_allocator(answer: Answer) -> int | None:
    """Read off a row what its process held besides reserved memory; None where it does not tell."""
    measured = answer.row.measured
    if measured.context_bytes is not None:
        return measured.context_bytes
    if measured.process_bytes is None or answer.predicted is None:
        return None
    return measured.process_bytes - answer.predicted.reserved.likely_bytes


def _verdicts(
    row: Row, predicted: Predicted, figures: Mapping[str, Figure], context_bytes: int
) -> Iterable[Verdict]:
    """Answer for every limit whose outcome is known."""
    whole = _whole(figures)
    if row.outcome == "ok" and whole is not None and whole.measured_bytes is not None:
        for fraction in BUDGET_FRACTIONS:
            yield _verdict("budget", round(whole.measured_bytes * fraction), whole, fraction > 1)
        yield _verdict("card", predicted.card_bytes, whole, fits=True)
    if predicted.smallest_bytes is None:
        return
    smallest = _scaled(figures["reserved"], predicted.smallest_bytes, 0)
    for cap in row.measured_extra.get("cap_tests") or ():
        limit_bytes = int(cap["cap_fraction"] * predicted.card_bytes)
        yield _verdict("cap", limit_bytes, smallest, not cap["oom"])
    if row.outcome == "oom":
        smallest = _scaled(figures["reserved"], predicted.smallest_bytes, context_bytes)
        yield _verdict("oom", predicted.card_bytes, smallest, fits=False)


def _whole(figures: Mapping[str, Figure]) -> Figure | None:
    """Return the widest quantity that was measured."""
    measured = [name for name in reversed(QUANTITIES) if figures[name].measured_bytes]
    return figures[measured[0]] if measured else None


def _scaled(reserved: Figure, num_bytes: int, context_bytes: int) -> Figure:
    """Return the least memory the interval that reserved memory has, in proportion."""
    scale = num_bytes / reserved.predicted_bytes if reserved.predicted_bytes else 0.0
    interval = Interval(
        low_bytes=int(reserved.interval.low_bytes * scale) + context_bytes,
        high_bytes=int(reserved.interval.high_bytes * scale) + context_bytes,
    )
    predicted_bytes = num_bytes + context_bytes
    return Figure(predicted_bytes=predicted_bytes, interval=interval, measured_bytes=None)


def _verdict(kind: str, limit_bytes: int, figure: Figure, fits: bool) -> Verdict:
    return Verdict(
        kind=kind,
        limit_bytes=limit_bytes,
        says_fits=figure.predicted_bytes <= limit_bytes,
        fits=fits,
        is_uncertain=figure.interval.low_bytes <= limit_bytes <= figure.interval.high_bytes,
    )


def summaries(scores: Sequence[Score]) -> tuple[Summary, ...]:
    """Sum up every source and quantity of which anything was measured, in order of appearance."""
    sources = dict.fromkeys(score.row.source for score in scores)
    found: list[Summary] = []
    for source in sources:
        of_source = [score for score in scores if score.row.source == source]
        found += [summary(source, name, of_source) for name in _measured_in(of_source)]
    return tuple(found)


def _measured_in(scores: Sequence[Score]) -> list[str]:
    return [
        name
        for name in QUANTITIES
        if any(getattr(score.row.measured, f"{name}_bytes") for score in scores)
    ]


def summary(source: str, quantity: str, scores: Iterable[Score]) -> Summary:
    """Sum up the errors of one quantity; all figures are None without a single row."""
    figures = [score.figures[quantity] for score in scores if quantity in score.figures]
    covered = [figure.is_covered for figure in figures if figure.is_covered is not None]
    errors = [figure.error for figure in figures if figure.error is not None]
    return summarized(source, quantity, errors, covered)


def summarized(
    source: str, quantity: str, errors: Sequence[float], covered: Sequence[bool] = ()
) -> Summary:
    """Sum up signed errors."""
    sizes = [abs(error) for error in errors]
    return Summary(
        source=source,
        quantity=quantity,
        rows=len(errors),
        median_abs_error=statistics.median(sizes) if sizes else None,
        p95_abs_error=percentile(sizes, 0.95) if sizes else None,
        worst_abs_error=max(sizes, default=None),
        mean_signed_error=statistics.fmean(errors) if errors else None,
        coverage=statistics.fmean(covered) if covered else None,
    )


def percentile(values: Iterable[float], fraction: float) -> float:
    """Return a percentile, linear between the two nearest values."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictCount:
    """How many verdicts there are, and how many are wrong."""

    all: int
    wrong: int
    uncertain: int
    """Verdicts whose limit lies inside the stated interval."""
    wrong_and_certain: int
    wrongly_fits: int
    """Wrong verdicts that promise too much."""

    @property
    def wrong_fraction(self) -> float | None:
        """Return the share of wrong verdicts, uncertain ones included."""
        return self.wrong / self.all if self.all else None


def count_verdicts(scores: Iterable[Score], kinds: Sequence[str] | None = None) -> VerdictCount:
    """Count the verdicts of some kinds, None for all."""
    verdicts = [each for score in scores for each in score.verdicts]
    verdicts = [each for each in verdicts if kinds is None or each.kind in kinds]
    wrong = [each for each in verdicts if each.is_wrong]
    return VerdictCount(
        all=len(verdicts),
        wrong=len(wrong),
        uncertain=sum(each.is_uncertain for each in verdicts),
        wrong_and_certain=sum(not each.is_uncertain for each in wrong),
        wrongly_fits=sum(each.says_fits for each in wrong),
    )
