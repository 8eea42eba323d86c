"""The section on WPO-SGM's strategies, beside each other."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.units import format_bytes, format_fraction

from .blocks import Figures, table


def strategies(figures: Figures) -> Iterator[str]:
    """Say what each strategy takes where it was run, and at the document's size."""
    yield (
        f"`{figures['flags']}`: {_sizes(figures)}, on one thread of a CPU. Peaks are of a step "
        "whose optimizer has its states. Time is the processor's, over that of `single_gpu` in the "
        f"same round, median of {figures['num_rounds']} rounds. Gradients are in float64, with "
        "random weights: the largest relative difference, over parameters, from those of "
        "`single_gpu`."
    )
    rows = figures["measured"]
    yield table(
        "`--strategy` | predicted peak | measured | difference | time | gradients differ by",
        "lrrrrr",
        (
            (
                _name(row, figures),
                format_bytes(row["predicted_peak_bytes"]),
                format_bytes(row["measured_peak_bytes"]),
                # Adding 0 turns -0 into 0.
                format_fraction(round(row["error_fraction"], 4) + 0.0),
                f"{row['time_over_single']:.2f} x",
                _difference(row["gradient_difference_fraction"]),
            )
            for row in rows
        ),
    )
    yield "\n".join(f"- {note}" for note in _notes(figures))
    yield from _on_card(figures["card"], figures)


def _sizes(figures: Figures) -> str:
    return (
        f"{figures['num_dimensions']:,} dimensions, {figures['num_centres']:,} centres, batch "
        f"{figures['batch_size']}, `--precision {figures['precision']}`"
    )


def _name(row: Figures, figures: Figures) -> str:
    if row["is_naive"]:
        return f"mean over parts of {figures['naive_part']}"
    return f"`{row['flags'].removeprefix('--strategy ')}`"


def _difference(fraction: float) -> str:
    return f"{fraction:.1e}" if fraction else "0"


def _notes(figures: Figures) -> Iterator[str]:
    """Say what the columns leave open."""
    yield "What is streamed is computed twice, and ranks stream always."
    shared = [row for row in figures["measured"] if row["num_ranks"] > 1]
    elapsed = " and ".join(f"{row['elapsed_over_single']:.2f}" for row in shared)
    yield (
        f"The {figures['num_ranks']} ranks are processes over gloo. Shown are the higher peak and "
        "the busier processor, over steps of `single_gpu` on the first rank in turns, in "
        f"{figures['num_shared_rounds']} rounds. By the clock "
        f"their steps took {elapsed} times as long as those, on {figures['num_processors']} cores "
        "that other programs used as well. A thread of gloo's may free its copy of what is "
        "exchanged late, which adds to a measured peak."
    )
    (naive,) = (row for row in figures["measured"] if row["is_naive"])
    yield (
        "The mean over parts, each a mixture of its own, is another objective. Its loss differs by "
        f"{naive['loss_difference_fraction']:.1e} with these weights."
    )


def _on_card(card: Figures, figures: Figures) -> Iterator[str]:
    yield (
        f"Predicted for `{card['device']}` at the document's size, {_sizes(card)}; nothing was "
        "run. Step times are the roofline's, without what ranks exchange. `model_parallel` "
        "without a chunk size holds each rank's centres at once here; the command looks for a plan "
        "that fits."
    )
    yield table(
        "`--strategy` | plan | peak | process | fits | step",
        "llrrlr",
        (
            (
                _name(row, figures),
                ", ".join(f"`{each}`" for each in row["strategies"]),
                format_bytes(row["peak_allocated_bytes"]),
                format_bytes(row["process_bytes"]),
                "yes" if row["fits"] else "no",
                f"{row['step_seconds']:.2f} s",
            )
            for row in card["rows"]
        ),
    )
