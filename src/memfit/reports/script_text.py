"""The prediction of a script for a terminal: its phases, step and data, and what was answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.figures import BOUNDED_FIGURES, Prediction
from memfit.script.data_prediction import DataPrediction
from memfit.script.prediction import ScriptPrediction
from memfit.script.shapes_replay import SequenceOutcome
from memfit.units import format_bytes

from .brief_text import (
    SCREEN_LINES,
    held_parts,
    next_section,
    next_steps,
    num_lines_of,
    verdict_text,
)
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
        *_data_sections(found),
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
        figures = [phase.peak_allocated_bytes]
        if is_card:
            figures += [phase.peak_reserved_bytes, phase.process_bytes]
        if has_host:
            figures.append(phase.host_peak_bytes)
        table.add_row(phase.phase, *[format_bytes(num_bytes) for num_bytes in figures])
    return table


def _kept_back(found: ScriptPrediction) -> Sequence[str]:
    lines = [f"{each.source_line}: {each.what} was refused" for each in found.refused]
    if found.num_diverted_files:
        files = "1 file" if found.num_diverted_files == 1 else f"{found.num_diverted_files} files"
        lines.append(f"{files} ({format_bytes(found.diverted_bytes)}) written and dropped")
    return lines


def _data_sections(found: ScriptPrediction) -> list[RenderableType]:
    """Show the largest batch, how peaks are spread, and what becomes of the allocator."""
    if found.data is None:
        return []
    return [section("The whole of its data", dashed(map(Text, data_lines(found.data))))]


def data_lines(data: DataPrediction) -> Sequence[str]:
    """Write what was found, a sentence each."""
    lines = [_scanned(data)]
    if data.reason:
        lines.append(f"not all of it: {data.reason}" if data.num_batches else data.reason)
    if data.largest is None:
        return lines + _why_no_peaks(data)
    lines += _largest(data)
    spread = ", ".join(
        f"{name} {format_bytes(size)}" for name, size in data.quantiles_bytes.items()
    )
    lines.append(f"allocated peaks of the steps, by the share that takes no more: {spread}")
    lines += [_sequence(name, data, each) for name, each in data.sequence.items()]
    lines.append(_method(data))
    return lines


def _scanned(data: DataPrediction) -> str:
    if not data.num_batches:
        return "nothing was read"
    whole = "the whole epoch" if data.is_complete else "not the whole epoch"
    shapes = "1 shape" if data.num_shapes == 1 else f"{data.num_shapes:,} different shapes"
    return f"{data.num_batches:,} batches read in {data.scan_seconds:.1f} s ({whole}), of {shapes}"


def _why_no_peaks(data: DataPrediction) -> list[str]:
    if data.num_shapes == 1:
        return ["every batch has the same shape, so every step takes what the steady one takes"]
    if data.num_not_recorded:
        sentence = (
            f"the loop ended before {data.num_not_recorded} batches of other shapes could be "
            "handed to it; let it make more steps"
        )
        return [sentence]
    return []


def _largest(data: DataPrediction) -> list[str]:
    largest = data.largest
    assert largest is not None, "asked before"
    times = largest.peak_allocated_bytes / max(1, largest.steady_peak_bytes)
    shapes = ", ".join(largest.shapes)
    size = format_bytes(largest.peak_allocated_bytes)
    if data.sequence:
        size += (
            f" allocated, {format_bytes(largest.peak_reserved_bytes)} reserved, "
            f"{format_bytes(largest.process_bytes)} of the process"
        )
    place = f"largest is batch {largest.position + 1:,} ({shapes})"
    lines = [f"{place}: {size}; {times:.1f} times the steady step"]
    if not largest.is_recorded:
        lines.append("its own step was not recorded: its peak follows from those of other batches")
    elif not largest.is_confirmed:
        lines.append(
            "no module was called with tensors of its shape, so its step was found by counting"
        )
    return lines


def _sequence(name: str, data: DataPrediction, outcome: SequenceOutcome) -> str:
    setting = "expandable segments" if name == "expandable_segments" else "the default allocator"
    first = data.first_replayed
    where = f" from batch {first + 1:,}" if first else ""
    end = (
        "it survives the card"
        if outcome.survived
        else f"the card is exhausted in step {(outcome.failed_step or 0) + 1:,}"
    )
    return (
        f"{outcome.num_steps:,} steps{where} with {setting}: "
        f"{format_bytes(outcome.peak_reserved_bytes)} reserved at most, "
        f"{outcome.fragmentation_fraction:.0%} of it above what was ever allocated; {end}"
    )


def _method(data: DataPrediction) -> str:
    names = ("recorded", "fitted", "nearest larger", "larger than recorded")
    recorded, fitted, nearest, beyond = (data.method.get(name, 0) for name in names)
    parts = [f"{recorded:,} steps are of recorded shapes"]
    if fitted:
        parts.append(
            f"{fitted:,} by polynomials of the lengths that give {data.fitted_fraction:.1%} of "
            "the bytes, the rest by a larger batch"
        )
    if nearest:
        parts.append(f"{nearest:,} taken for the nearest recorded larger batch")
    if beyond:
        parts.append(
            f"{beyond:,} are of batches larger than any whose step was recorded, so they take MORE "
            "than is said here: let the loop make more steps"
        )
    return "; ".join(parts)
