"""A prediction on one screen: the verdict first, then the figures behind it and what to do next."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from memfit.devices.spec import CPU
from memfit.figures import Advice, Answer, Certainty, Prediction, Topic
from memfit.units import format_bytes, format_seconds

from .plan_words import plan_in_words
from .rollup import down_to, rolled_up, unfolded
from .terminal import INDENT, Bar, Name, amount, at_page_width, dashed, grid, section
from .wording import (
    NUMERICS_MEANING,
    fits_sentence,
    interval_words,
    is_uncertain,
    largest_first,
    percent,
    place_words,
    process_certainty,
)

SCREEN_LINES = 24
_NUM_CATEGORIES = 3
_FEWEST_MODULES, _MOST_MODULES = 3, 6
_NAME_WIDTH = 30
_MOST_STEPS = 4
_MOST_NOTES = 1
_ALL = "--verbose shows all that was found."


def brief_prediction(
    prediction: Prediction,
    advice: Sequence[Advice] = (),
    commands: Sequence[str] = (),
    *,
    depth: int | None = None,
) -> RenderableType:
    """Show whether a step fits, what it takes, what holds that, and what to do next.

    Args:
        prediction: what is shown.
        advice: what would change it, what is worth most first.
        commands: what may be typed next, a sentence each.
        depth: how many levels of modules are unfolded; None unfolds the largest.
    """
    title = Text(f"Predicted step on {place_words(prediction)}", style="dim")
    facts = fact_rows(prediction)
    steps = next_steps(prediction, advice, commands)
    said = [fact.plain for _, fact in facts]
    verdict = verdict_text(prediction)
    num_lines = num_lines_of([verdict.plain], 80) + num_lines_of(said, 66)
    num_lines += num_lines_of(steps, 72) + _NUM_CATEGORIES + 9
    parts = [
        verdict,
        title,
        Padding(fact_table(facts), INDENT),
        *held_parts(prediction, SCREEN_LINES - num_lines, depth=depth),
        next_section(steps),
    ]
    return at_page_width(*parts)


def next_section(steps: Sequence[str]) -> RenderableType:
    """Show what may be done next, and last that there is more to see."""
    rest = Text(_ALL, style="dim")
    if not steps:
        return Padding(rest, (1, 0, 0, 0))
    return section("Next", Group(dashed(Text(step) for step in steps), rest))


def num_lines_of(sentences: Sequence[str], width: int) -> int:
    """Return how many lines sentences take, each wrapped on its own."""
    return sum(max(1, -(-len(sentence) // width)) for sentence in sentences)


def verdict_text(prediction: Prediction) -> Text:
    """Write whether a step fits, in the colour of the answer."""
    style = {True: "bold green", False: "bold red", None: "bold"}[prediction.fits]
    if is_uncertain(prediction):
        style = "bold yellow"
    return Text(fits_sentence(prediction, prediction.budget_bytes), style=style)


def fact_table(rows: Sequence[tuple[str, Text]]) -> Table:
    """Show facts, each behind its name."""
    table = grid(Column(no_wrap=True), Column(overflow="fold"))
    for name, fact in rows:
        table.add_row(Text(name, style="dim"), fact)
    return table


def fact_rows(prediction: Prediction) -> list[tuple[str, Text]]:
    """Return peak, budget, time, plan and largest block, each with its name."""
    rows: list[tuple[str, Text]] = [("peak", _peak(prediction))]
    if prediction.budget_bytes:
        share = prediction.bounded_bytes() / prediction.budget_bytes
        of = f"{100 * share:.1f} % of {format_bytes(prediction.budget_bytes)}"
        interval = interval_words(prediction.intervals.get(prediction.budget_of))
        rows.append(("of budget", Text(of + (f"; likely {interval}" if interval else ""))))
    batch = "" if prediction.batch_size is None else f", batch size {prediction.batch_size:,}"
    rows.append(("step", Text(f"{format_seconds(prediction.step_seconds)}, an estimate{batch}")))
    beside = [
        f"{format_bytes(num_bytes)} {where}"
        for where, num_bytes in (
            ("on the host", prediction.host_bytes),
            ("on disk", prediction.disk_bytes),
        )
        if num_bytes
    ]
    if beside:
        rows.append(("besides", Text(", ".join(beside))))
    if prediction.batch_size is not None:
        rows += plan_rows(prediction.strategies, prediction.numerics)
    if prediction.largest:
        block = max(prediction.largest, key=lambda each: each.num_bytes)
        made = [part for part in (block.operator, block.source_line) if part]
        origin = f": {' at '.join(made)}" if made else ""
        rows.append(
            ("largest", Text(f"{format_bytes(block.num_bytes)} of {block.category}{origin}"))
        )
    return rows


def plan_rows(strategies: Sequence[str], numerics: str) -> list[tuple[str, Text]]:
    """Say what a plan does, a line for each strategy, and what becomes of the results."""
    if not strategies:
        return [("plan", Text("none: the step as it is"))]
    rows: list[tuple[str, Text]] = []
    for words, name in plan_in_words(strategies):
        said = Text(words)
        if not words.startswith(name):
            said.append(f" ({name})", style="dim")
        rows.append(("" if rows else "plan", said))
    rows.append(("results", Text(f"{numerics}: {NUMERICS_MEANING.get(numerics, numerics)}")))
    return rows


def held_parts(
    prediction: Prediction, num_modules: int, *, depth: int | None = None
) -> list[RenderableType]:
    """Show what holds the peak: by category, and by module with alike ones rolled up."""
    peak_bytes = prediction.peak_allocated_bytes
    parts: list[RenderableType] = []
    if prediction.by_category:
        table = grid(Column(), amount(), amount(), Column())
        for name, num_bytes in largest_first(prediction.by_category, limit=_NUM_CATEGORIES):
            share = num_bytes / peak_bytes if peak_bytes else 0.0
            table.add_row(
                Name(name, _NAME_WIDTH),
                format_bytes(num_bytes),
                percent(num_bytes, peak_bytes),
                Bar(min(1.0, share)),
            )
        parts.append(section("What holds the peak", table))
    if prediction.by_module:
        most = min(_MOST_MODULES, max(_FEWEST_MODULES, num_modules))
        body = module_table(prediction, most_rows=most, depth=depth)
        parts += [Text("In which modules", style="bold"), Padding(body, INDENT)]
    return parts


def module_table(
    prediction: Prediction,
    *,
    most_rows: int,
    depth: int | None = None,
    name_width: int = _NAME_WIDTH,
) -> Table:
    """Show modules, alike ones rolled up: the largest unfolded, or all of them to a depth."""
    groups = rolled_up(prediction.by_module)
    rows = [(0, group) for group in unfolded(groups, most_rows)]
    if depth is not None:
        rows = list(down_to(groups, depth))
    has_several = any(group.num_modules > 1 for _, group in rows)
    several = [Column(no_wrap=True)] if has_several else []
    table = grid(Column(), *several, amount(), amount(), *([] if has_several else [Column()]))
    peak_bytes = prediction.peak_allocated_bytes
    for level, group in rows:
        share = group.total_bytes / peak_bytes if peak_bytes else 0.0
        each = [Text(group.each, style="dim")] if has_several else []
        table.add_row(
            Name(group.name, name_width, level),
            *each,
            format_bytes(group.total_bytes),
            percent(group.total_bytes, peak_bytes),
            *([] if has_several else [Bar(min(1.0, share))]),
        )
    return table


def next_steps(
    prediction: Prediction, advice: Sequence[Advice], commands: Sequence[str]
) -> list[str]:
    """Say what may be typed next, what would change the answer, and what to know."""
    known = [_answered(prediction.answers)] if prediction.answers else []
    known += [f"{note}." for note in prediction.notes[:_MOST_NOTES]]
    most = max(1, _MOST_STEPS - num_lines_of([*commands, *known], 72))
    worth = [_brief(each) for each in advice[:most]]
    return [*commands, *worth, *known]


def _answered(answers: Sequence[Answer]) -> str:
    """Say how many lines got answers that nobody knows, and name the first of them."""
    lines = list(dict.fromkeys(each.source_line for each in answers))
    others = len(lines) - 1
    more = "" if not others else f" and {others} other {'line' if others == 1 else 'lines'}"
    return f"Answered without being known, which figures may rest on: {lines[0]}{more}."


def _peak(prediction: Prediction) -> Text:
    """Write the peaks, the one that the budget bounds marked, and how it is known."""
    figures = [("allocated", prediction.peak_allocated_bytes)]
    if prediction.device != CPU:
        figures.append(("reserved", prediction.peak_reserved_bytes))
    figures.append(("process", prediction.process_bytes))
    text = Text()
    for name, num_bytes in figures:
        style = "bold" if name == prediction.budget_of else ""
        certainty = process_certainty(prediction) if name == "process" else prediction.certainty
        text.append(", " if text else "")
        text.append(f"{format_bytes(num_bytes)} {name}", style=style)
        if name == prediction.budget_of or certainty is Certainty.GUESS:
            text.append(f" ({certainty.value})", style="dim")
    return text


def _brief(advice: Advice) -> str:
    """Write a piece of advice in a line."""
    figure = format_bytes(advice.num_bytes)
    share = f"{100 * advice.part_fraction:.0f} %"
    return {
        Topic.EXPANDABLE_SEGMENTS: (
            f"PYTORCH_ALLOC_CONF=expandable_segments:True reserves {figure} less ({share})."
        ),
        Topic.OPTIMIZER_TEMPORARIES: (
            f"fused=True or foreach=False in the optimizer: up to {figure} less ({share})."
        ),
        Topic.SAVED_ACTIVATIONS: (
            f"Checkpointing or bf16 shrinks {figure} of saved activations ({share})."
        ),
        Topic.GUESSED_TERM: (
            f"`memfit calibrate` on the card measures a guess of {figure} ({share})."
        ),
        Topic.BYTES_PER_SAMPLE: f"Each sample of the batch takes about {figure}.",
        Topic.MICRO_BATCH: f"Micro-batches of {advice.subject} samples fit.",
    }[advice.topic]
