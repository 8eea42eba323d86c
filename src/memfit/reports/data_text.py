"""What the whole of a script's data takes, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from memfit.script.data_prediction import DataPrediction
from memfit.script.prediction import ScriptPrediction
from memfit.script.shapes_replay import SequenceOutcome
from memfit.units import format_bytes

from .terminal import dashed, section


def data_sections(found: ScriptPrediction) -> list[RenderableType]:
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
