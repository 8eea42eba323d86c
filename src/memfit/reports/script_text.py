"""The prediction of a script for a terminal: its phases, its step, and what was answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.figures import BOUNDED_FIGURES, Prediction
from memfit.script.prediction import PhasePeak, ScriptPrediction
from memfit.units import format_bytes

from .brief_text import (
    SCREEN_LINES,
    held_parts,
    next_section,
    next_steps,
    num_lines_of,
    verdict_text,
)
from .data_text import data_lines, data_sections
from .prediction_text import answers_section, prediction_parts
from .terminal import INDENT, amount, at_page_width, dashed, grid, section, word
from .wording import answer_sentences

_NUM_DATA_LINES = 2


def script_text(found: ScriptPrediction, *, top: int, depth: int | None = None) -> RenderableType:
    """Show a script's phases first, then its steady step, then what was made up for it.

    Args:
        found: what is shown.
        top: how many of the largest modules and blocks are shown.
        depth: how many levels of modules are unfolded; None unfolds the largest.
    """
    parts = [
        Text(f"{found.script} on {found.prediction.device}", style="bold"),
        Padding(_sentence(found), INDENT),
        section("Peaks of its phases", _phase_table(found)),
        *data_sections(found),
        section("The largest steady step", Text("")),
        *prediction_parts(found.prediction, top=top, depth=depth),
    ]
    if found.answers:
        lines = answer_sentences(found.answers)
        if found.skewed is not None:
            even, uneven = found.prediction.bounded_bytes(), found.skewed.bounded_bytes()
            lines.append(
                f"sizes: {format_bytes(even)} where choices are evenly spread, "
                f"{format_bytes(uneven)} where they are as uneven as can be"
            )
        parts.append(answers_section(lines))
    if kept := _kept_back(found):
        parts.append(section("Kept from the outside", dashed(map(Text, kept))))
    return at_page_width(*parts)


def brief_script(
    found: ScriptPrediction, commands: Sequence[str] = (), *, depth: int | None = None
) -> RenderableType:
    """Show whether every phase of a script fits, their peaks, and what holds the steady one.

    Args:
        found: what is shown.
        commands: what may be typed next, a sentence each.
        depth: how many levels of modules are unfolded; None unfolds the largest.
    """
    prediction = found.prediction
    table = _phase_table(found)
    steps = next_steps(replace(prediction, answers=found.answers), (), commands)
    if kept := _kept_back(found):
        steps.append(f"{kept[0]}.")
    data = data_lines(found.data)[:_NUM_DATA_LINES] if found.data is not None else []
    num_lines = table.row_count + num_lines_of(steps, 72) + num_lines_of(data, 72) + 15
    parts = [
        verdict_text(_of_worst_phase(found)),
        _sentence(found),
        Text(f"{found.script} on {prediction.device}", style="dim"),
        Padding(table, INDENT),
        *([Padding(dashed(map(Text, data)), INDENT)] if data else []),
        *held_parts(prediction, SCREEN_LINES - num_lines, depth=depth),
        next_section(steps),
    ]
    return at_page_width(*parts)


def _of_worst_phase(found: ScriptPrediction) -> Prediction:
    """Return the prediction with the figures of the phase that decides whether the script fits."""
    worst, prediction = found.worst, found.prediction
    figures = {name: getattr(worst, name) for name in BOUNDED_FIGURES.values()}
    is_steady = figures[_figure(found)] == prediction.bounded_bytes()
    intervals = prediction.intervals if is_steady else {}
    return replace(prediction, **figures, intervals=intervals)


def _sentence(found: ScriptPrediction) -> Text:
    """Say which phase is the worst, and by how much."""
    worst = found.worst
    steady_bytes = found.prediction.bounded_bytes()
    worst_bytes = getattr(worst, _figure(found))
    more = worst_bytes - steady_bytes
    text = f"The highest peak is that of {_the(worst.phase)}: {format_bytes(worst_bytes)}"
    if more > 0 and worst.phase not in ("steady step", "first step"):
        text += f", {format_bytes(more)} more than the steady step"
    return Text(text + ".")


def _figure(found: ScriptPrediction) -> str:
    return BOUNDED_FIGURES[found.prediction.budget_of]


def _the(phase: str) -> str:
    return {
        "load": "loading",
        "evaluation": "evaluation",
        "largest batch": "its largest batch",
        "checkpoint": "writing a checkpoint",
    }.get(phase, f"the {phase}")


def _phase_table(found: ScriptPrediction) -> Table:
    has_host = any(phase.host_peak_bytes for phase in found.phases)
    is_card = found.prediction.device != "cpu"
    headings = ["allocated"]
    if is_card:
        headings += ["reserved", "process"]
    if has_host:
        headings.append("on the host")
    table = grid(word("phase"), *map(amount, headings))
    for phase in found.phases:
        table.add_row(phase.phase, *_cells(phase, is_card=is_card, has_host=has_host))
    return table


def _cells(phase: PhasePeak, *, is_card: bool, has_host: bool) -> list[str]:
    figures = [phase.peak_allocated_bytes]
    if is_card:
        figures += [phase.peak_reserved_bytes, phase.process_bytes]
    if has_host:
        figures.append(phase.host_peak_bytes)
    return [format_bytes(num_bytes) for num_bytes in figures]


def _kept_back(found: ScriptPrediction) -> Sequence[str]:
    lines = [f"{each.source_line}: {each.what} was refused" for each in found.refused]
    if found.num_diverted_files:
        files = "1 file" if found.num_diverted_files == 1 else f"{found.num_diverted_files} files"
        lines.append(f"{files} ({format_bytes(found.diverted_bytes)}) written and dropped")
    return lines
