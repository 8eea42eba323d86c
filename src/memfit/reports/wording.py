"""The words that the terminal and the page share, so that both say the same about a figure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from memfit.figures import (
    Advice,
    Answer,
    Certainty,
    ConsideredPlan,
    Interval,
    Measurement,
    Prediction,
    Topic,
)
from memfit.units import format_bytes, format_fraction, format_seconds, in_unit_of

from .terminal import shorten as shorten

NUMERICS_MEANING = {
    "exact": "equal to the plain step up to rounding",
    "same-in-law": "the same in law, with other random draws such as dropout masks",
    "unproved": "not known to be equal to the plain step, since it could not be followed",
    "approximate": "close to the plain step, not equal to it",
    "different": "another training problem than the plain step",
}
FIGURE_NAMES = {
    "allocated": "peak allocated",
    "reserved": "peak reserved",
    "process": "process",
}

_BRIEF_WIDTH = 160
_MANY_TIMES = 10
"""From so many times on, a change is not written in percent."""
_MOST_ALIKE = 2
_MOST_ANSWERS = 12
_LONG_LIST = re.compile(r"(?P<setting>\w+=|)(?P<words>[^=,()]+ [^=,()]+)")
_NOUNS = {"keep=": "results", "blocks=": "modules"}


def plan_name(strategies: Sequence[str], *, width: int | None = None) -> str:
    """Join the strategies of a plan; a plan without any is the plain step.

    A name wider than ``width`` gets one line per strategy, each in brief.
    """
    name = " + ".join(strategies) if strategies else "plain"
    if width is None or len(name) <= width:
        return name
    return "\n+ ".join(_broken(label, width) for label in _brief_labels(strategies))


def brief_plan(strategies: Sequence[str]) -> str:
    """Join the strategies of a plan in one line, long lists of blocks and results counted."""
    return " ".join(plan_name(strategies, width=_BRIEF_WIDTH).split())


def instead_of(strategies: Sequence[str], before: Sequence[str]) -> str:
    """Return how a plan differs from another one, each strategy in brief."""
    added = _brief_labels([label for label in strategies if label not in before])
    dropped = _brief_labels([label for label in before if label not in strategies])
    if added and dropped:
        return f"with {' and '.join(added)} instead of {' and '.join(dropped)}"
    return f"with {' and '.join(added)}" if added else f"without {' and '.join(dropped)}"


def _brief_labels(labels: Sequence[str]) -> list[str]:
    """Count long lists instead of writing them, and what a strategy has more than twice."""
    counts = Counter(label.partition("(")[0] for label in labels)
    brief: dict[str, None] = {}
    for label in labels:
        name = label.partition("(")[0]
        many = f"{name} ({counts[name]} times, for different blocks)"
        brief[many if counts[name] > _MOST_ALIKE else _LONG_LIST.sub(_counted, label)] = None
    return list(brief)


def _counted(match: re.Match[str]) -> str:
    words = match["words"].split()
    if len(words) <= _MOST_ALIKE:
        return match.group()
    return f"{match['setting']}{len(words)} {_NOUNS.get(match['setting'], 'names')}"


def _broken(label: str, width: int) -> str:
    """Put the settings of a label on a line of their own where it is too long."""
    name, opening, settings = label.partition("(")
    return (
        f"{name.rstrip()}\n  {opening}{settings}" if opening and len(label) + 2 > width else label
    )


def change(value: float, before: float) -> str:
    """Write a change as a percentage: ``-3.0 %``."""
    return f"{100 * (value / before - 1):+.1f} %" if before else "-"


def module_name(module: str) -> str:
    """Name a module; what belongs to none belongs to the step itself."""
    return module or "(step)"


def largest_first(parts: Mapping[str, int], *, limit: int | None = None) -> list[tuple[str, int]]:
    """Order parts by bytes without the empty ones; past ``limit`` they are added up in one line."""
    ordered = sorted(
        ((name, num_bytes) for name, num_bytes in parts.items() if num_bytes),
        key=lambda part: (-part[1], part[0]),
    )
    if limit is None or len(ordered) <= limit:
        return ordered
    rest = ordered[limit:]
    return [*ordered[:limit], (f"({len(rest)} others)", sum(part[1] for part in rest))]


def percent(part_bytes: int, whole_bytes: int) -> str:
    """Write a part of a whole as a percentage."""
    return f"{100 * part_bytes / whole_bytes:.1f} %" if whole_bytes else "-"


def error_fraction(predicted: float | None, measured: float | None) -> float | None:
    """Return the signed error of a prediction: above zero when too much was predicted."""
    if predicted is None or not measured:
        return None
    return predicted / measured - 1


def signed_error(predicted: float | None, measured: float | None) -> str:
    """Write the signed error of a prediction, or ``-`` where one side is unknown."""
    error = error_fraction(predicted, measured)
    return "-" if error is None else format_fraction(error)


def change_words(before: float, after: float) -> str:
    """Write how a figure changes, in percent of what it was."""
    if before == after:
        return "same"
    if not before:
        return "new"
    if after >= _MANY_TIMES * before:
        return f"{after / before:,.0f} times"
    return format_fraction(after / before - 1) if after else "gone"


def measured_bytes(measurement: Measurement, budget_of: str) -> int | None:
    """Return the measured figure that a budget bounds; None where the device does not report it."""
    return {
        "allocated": measurement.peak_allocated_bytes,
        "reserved": measurement.peak_reserved_bytes,
        "process": measurement.process_bytes,
    }[budget_of]


def is_within(prediction: Prediction, budget_bytes: int | None) -> bool | None:
    """Return whether a prediction fits; None without a budget.

    The prediction's own verdict counts where it was made for this budget.
    """
    if budget_bytes is None:
        return None
    if prediction.budget_bytes == budget_bytes:
        return prediction.fits
    return prediction.bounded_bytes() <= budget_bytes


def is_uncertain(prediction: Prediction) -> bool:
    """Return whether the budget lies inside the interval of the figure that it bounds."""
    interval = prediction.intervals.get(prediction.budget_of)
    if interval is None or prediction.budget_bytes is None:
        return False
    return interval.low_bytes <= prediction.budget_bytes < interval.high_bytes


def place_words(prediction: Prediction) -> str:
    """Name the device of a prediction, and the rank where it is one of several."""
    if prediction.ranks == 1:
        return prediction.device
    return f"{prediction.device}, rank {prediction.rank} of {prediction.ranks}"


def verdict(prediction: Prediction) -> str:
    """Write whether a prediction fits its budget: ``yes``, ``no``, ``uncertain``; ``-`` if none."""
    if prediction.fits is None:
        return "-" if prediction.budget_bytes is None else "uncertain"
    if is_uncertain(prediction):
        return "uncertain"
    return "yes" if prediction.fits else "no"


def interval_words(interval: Interval | None) -> str:
    """Write an interval with its unit: ``1.47 to 1.53 GiB``; empty without one."""
    if interval is None:
        return ""
    low = in_unit_of(interval.low_bytes, interval.high_bytes)
    return f"{low} to {format_bytes(interval.high_bytes)}"


def process_certainty(prediction: Prediction) -> Certainty:
    """Return the weakest certainty of a prediction and its terms."""
    order = list(Certainty)
    return max(
        (prediction.certainty, *(term.certainty for term in prediction.terms)), key=order.index
    )


def bounded_certainty(prediction: Prediction) -> Certainty:
    """Return how the figure that the budget bounds is known."""
    if prediction.budget_of == "process":
        return process_certainty(prediction)
    return prediction.certainty


def _bounded_figure(prediction: Prediction) -> str:
    """Write the figure that the budget bounds; a guess is called one."""
    guess = " (a guess)" if bounded_certainty(prediction) is Certainty.GUESS else ""
    return f"{format_bytes(prediction.bounded_bytes())}{guess}"


def fits_sentence(prediction: Prediction, budget_bytes: int | None) -> str:
    """Return whether a prediction fits a budget, and by how much."""
    within = is_within(prediction, budget_bytes)
    if budget_bytes is None:
        return "No budget was given."
    found = prediction.bounded_bytes()
    figure = f"{FIGURE_NAMES[prediction.budget_of]} {_bounded_figure(prediction)}"
    if within is None:
        return (
            f"Whether it fits the budget of {format_bytes(budget_bytes)} is not known: {figure} at "
            "least, as recording ended before a steady step."
        )
    if budget_bytes == prediction.budget_bytes and is_uncertain(prediction):
        interval = interval_words(prediction.intervals.get(prediction.budget_of))
        side = "Fits" if within else "Does not fit"
        return (
            f"{side} the budget of {format_bytes(budget_bytes)}, but uncertainly: {figure}, in "
            f"the interval {interval}."
        )
    if within:
        return (
            f"Fits the budget of {format_bytes(budget_bytes)}: {figure}, "
            f"{format_bytes(budget_bytes - found)} to spare."
        )
    excess = f", {format_bytes(found - budget_bytes)} too much" if found > budget_bytes else ""
    return f"Does not fit the budget of {format_bytes(budget_bytes)}: {figure}{excess}."


def explanation_lines(
    plain: Prediction,
    planned: Prediction,
    *,
    budget_bytes: int | None = None,
    rows: Sequence[ConsideredPlan] = (),
) -> list[str]:
    """Tell in sentences what the plan changes: peak, categories, time, numerics and the reason."""
    lines = [_plain_line(plain, budget_bytes)]
    if planned.strategies:
        lines += [_planned_line(plain, planned), *_category_lines(plain, planned)]
        lines.append(
            f"The step is predicted to take {format_seconds(planned.step_seconds)}; plain, "
            f"{format_seconds(plain.step_seconds)} "
            f"({signed_error(planned.step_seconds, plain.step_seconds)})."
        )
    meaning = NUMERICS_MEANING.get(planned.numerics, "")
    lines.append(
        f"Numerics: {planned.numerics}{': ' if meaning else ''}{meaning}. "
        f"The effective batch size is {planned.batch_size:,}."
    )
    lines += [f"Why this plan: {row.reason}" for row in rows if row.chosen and row.reason]
    return lines


def _plain_line(plain: Prediction, budget_bytes: int | None) -> str:
    """Set the plain peak against the budget."""
    found = plain.bounded_bytes()
    figure = f"The plain step: {FIGURE_NAMES[plain.budget_of]} {_bounded_figure(plain)}"
    if budget_bytes is None:
        return f"{figure}; no budget was given."
    side = "above" if found > budget_bytes else "below"
    return (
        f"{figure}, {format_bytes(abs(found - budget_bytes))} {side} "
        f"the budget of {format_bytes(budget_bytes)}."
    )


def _planned_line(plain: Prediction, planned: Prediction) -> str:
    """Set the planned peak against the plain one."""
    change = signed_error(planned.bounded_bytes(), plain.bounded_bytes())
    figure = _bounded_figure(planned)
    return f"The plan {plan_name(planned.strategies)} brings it to {figure} ({change})."


def _category_lines(plain: Prediction, planned: Prediction) -> list[str]:
    """Name the categories that change most, those that grow included."""
    names = {*plain.by_category, *planned.by_category}
    changes = {
        name: planned.by_category.get(name, 0) - plain.by_category.get(name, 0) for name in names
    }
    ordered = sorted(
        (name for name in names if changes[name]), key=lambda name: -abs(changes[name])
    )
    parts = [
        f"{name} {format_bytes(plain.by_category.get(name, 0))} to "
        f"{format_bytes(planned.by_category.get(name, 0))}"
        for name in ordered[:3]
    ]
    return [f"What changes most at the peak: {'; '.join(parts)}."] if parts else []


def advice_sentence(advice: Advice) -> str:
    """Write a piece of advice: what would change the answer, and by how much."""
    figure = format_bytes(advice.num_bytes)
    share = f"{100 * advice.part_fraction:.0f} %"
    return {
        Topic.EXPANDABLE_SEGMENTS: (
            f"PYTORCH_ALLOC_CONF=expandable_segments:True would reserve {figure} less ({share})."
        ),
        Topic.OPTIMIZER_TEMPORARIES: (
            "The peak lies in the optimizer's step. Another implementation (fused=True or "
            f"foreach=False) would lower it by up to {figure} ({share})."
        ),
        Topic.SAVED_ACTIVATIONS: (
            f"Saved activations hold {figure} ({share} of the peak). Checkpointing or bf16 shrinks "
            "them; for a memfit.Job, `memfit plan` finds the fastest way that fits."
        ),
        Topic.GUESSED_TERM: (
            f"{advice.subject}: {figure} ({share} of the process) is a guess. "
            "`memfit calibrate` on the card measures it."
        ),
        Topic.BYTES_PER_SAMPLE: f"Each sample of the batch takes about {figure}.",
        Topic.MICRO_BATCH: (
            f"Micro-batches of {advice.subject} samples fit, with the same effective batch; "
            "`memfit plan` finds the fastest plan."
        ),
    }[advice.topic]


def format_value(name: str, value: object) -> str:
    """Write a metric by the unit in its name: bytes, seconds, counts or four digits."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return str(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name == "seconds" or name.endswith("_seconds"):
        return format_seconds(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def flat_values(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """List named values as text, with nested mappings under dotted names."""
    flat: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            flat += flat_values(value, f"{prefix}{name}.")
        else:
            flat.append((f"{prefix}{name}", format_value(name, value)))
    return flat


def answer_sentences(answers: Sequence[Answer]) -> list[str]:
    """Write what was answered without being known, what decides sizes first."""
    ordered = sorted(answers, key=lambda answer: not answer.decides_sizes)
    lines = [_answer_sentence(answer) for answer in ordered[:_MOST_ANSWERS]]
    if len(ordered) > _MOST_ANSWERS:
        lines.append(f"and {len(ordered) - _MOST_ANSWERS} more; --json has all of them")
    return lines


def _answer_sentence(answer: Answer) -> str:
    times = f", {answer.num_times} times" if answer.num_times > 1 else ""
    end = "a size rests on it" if answer.decides_sizes else "branches on it may go another way"
    return f"{answer.source_line}: answered {answer.given}{times}; {end}"
