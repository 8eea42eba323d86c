"""The tables of what every command of a workload's document gives."""

from __future__ import annotations

from collections.abc import Iterator

from .blocks import Figures, table


def typed(figures: Figures) -> Iterator[str]:
    """List every line of a document, what it is typed as, and what came of it."""
    yield (
        f"{figures['num_lines']} of the document's {figures['num_in_document']} commands, typed "
        "with memfit's names "
        f"(`python benchmarks/bench_documents.py`, {figures['date']}, torch {figures['torch']}, a "
        f"CPU): {figures['num_done']} of {figures['num_lines']} end with exit code 0. The others "
        "end with the line that is shown. Peaks are predicted and measured; a run of one step has "
        "no optimizer states yet, and takes less than is predicted of a step."
    )
    yield table(
        "typed | exit | processor seconds | what came of it",
        "lrrl",
        (
            (
                f"`{_cell(row['typed'])}`",
                row["exit_code"],
                f"{row['processor_seconds']:.0f}",
                _cell(row["said"]),
            )
            for row in figures["rows"]
        ),
    )


def _cell(text: str) -> str:
    """Keep a text in its cell."""
    return text.replace("|", "\\|").replace("<", "&lt;")
