"""Sections on what very long runs take, and on what readers make of hostile files."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.units import format_bytes, format_seconds

from .blocks import Figures, table

_RUNS = {
    "bare": "the script by itself",
    "watched": "under `memfit run`",
    "guarded": "guarded, looking for leaks",
}


def soak(figures: Figures) -> Iterator[str]:
    """Say what a run of very many steps takes."""
    runs = figures["runs"]
    guarded = runs["guarded"]
    yield (
        f"{figures['num_steps']:,} steps of a tiny perceptron (a bare step takes "
        f"{format_seconds(runs['bare']['processor_step_seconds'])}): a plain script by itself and "
        "under `memfit run`, side by side, and a guarded run, in which a batch that is too large "
        f"comes every 500 steps (out of memory {guarded['num_out_of_memory']} times; then a "
        "smaller plan is kept for longer). One sample in "
        f"{figures['sampled_every']:,} steps; growth is that of the last tenth of them over step "
        f"{figures['from_step']:,}. All of Python's objects are looked at ten times, which takes "
        "memory itself: the highest is then. Of them, growth is the highest. The time is processor "
        "time per step over that of a bare loop."
    )
    yield table(
        "run | resident | highest | grows by | objects grow by | time | journal at most "
        "| its lines | page | report takes",
        "llllllllll",
        ([name, *_cells(runs[key])] for key, name in _RUNS.items()),
    )


def _cells(run: Figures) -> Iterator[str]:
    yield format_bytes(run["resident_bytes"])
    yield format_bytes(run["resident_highest_bytes"])
    yield format_bytes(run["resident_growth_bytes"])
    yield format_bytes(run["objects_growth_bytes"])
    if "ratio" not in run:
        yield from "-----"
        return
    yield f"{run['ratio']:.2f}"
    yield format_bytes(run["most_journal_bytes"])
    yield f"{run['num_lines']:,}"
    yield format_bytes(run["report_bytes"])
    yield format_seconds(run["report_processor_seconds"])


def fuzz_readers(figures: Figures) -> Iterator[str]:
    """Say what readers make of files that no user means."""
    outcomes = figures["outcomes"]
    rows = figures["rows"]
    quick = [row for row in rows if "page" not in row["reader"]]
    yield (
        f"{figures['num_inputs']:,} files for {figures['num_readers']} readers, seed "
        f"{figures['seed']}: each is one that can be read, with bytes, words or lines exchanged, "
        "doubled or cut off, or with what would have code run. Read "
        f"{outcomes['read']:,}, refused in a line {outcomes['refused']:,}. More than a line "
        f"{outcomes['more than a line']}, tracebacks {outcomes['traceback']}, code run "
        f"{outcomes['code run']}, hangs {outcomes['hang']}, more than a second "
        f"{outcomes['slow']}, more than 200 MiB {outcomes['large']}. The slowest took "
        f"{format_seconds(max(row['slowest_processor_seconds'] for row in quick))} of processor "
        "time on a busy machine (a page, which may take 10 s, apart), the largest rose by "
        f"{format_bytes(max(row['most_grown_bytes'] for row in rows))}."
    )
    for mended in figures.get("mended", ()):
        yield (
            f"Before, input {mended['input']} of {mended['reader']} had given a traceback "
            f"({mended['told']}). That was mended, and the reader was given its "
            f"{mended['run_again']:,} files again."
        )
    yield table(
        "reader | files | read | refused | slowest | rose by at most",
        "lrrrrr",
        (
            (
                row["reader"],
                f"{row['num_inputs']:,}",
                f"{row['outcomes']['read']:,}",
                f"{row['outcomes']['refused']:,}",
                format_seconds(row["slowest_processor_seconds"]),
                format_bytes(row["most_grown_bytes"]),
            )
            for row in rows
        ),
    )
