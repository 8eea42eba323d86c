"""Scores predictions against peaks that other people measured on GPUs; no GPU is needed.

Run: python benchmarks/score_accuracy.py [ROWS.jsonl ...]    (about five minutes on two cores)
The last lines on stdout are JSON objects, one per source and quantity.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from accuracy.metrics import Answer, Score, score_all
from accuracy.report import goal_table, write_page
from accuracy.results import as_json, context_readings
from accuracy.rows import Row, read_rows
from accuracy.stored import stored_scores
from accuracy.table import json_lines, text_table
from accuracy.workers import Place, predict_rows
from results_file import load_result, write_result
from rich.console import Console
from rich.progress import Progress

from memfit.errors import MemfitError, UsageError
from memfit.files import write_atomically
from memfit.units import format_seconds

_ROWS = Path(__file__).parent / "accuracy" / "rows"


def main(argv: Sequence[str] | None = None) -> int:
    """Score the rows of all files, and print tables and JSON lines."""
    options = _parser().parse_args(argv)
    try:
        placed = _read(options.files or sorted(_ROWS.glob("*.jsonl")), options.only)
    except MemfitError as error:
        print(error, file=sys.stderr)
        return 2
    known = (
        ()
        if options.write_docs and not options.keep_others
        else context_readings(load_result("accuracy_gpu"))
    )
    scores = score_all(_answers(placed, options.jobs), known)
    if options.keep_others:
        scores = _beside_others(scores)
    figures = as_json(scores)
    if options.json_out:
        write_atomically(options.json_out, json.dumps(figures, indent=1) + "\n")
    if options.write_docs:
        write_result("accuracy_gpu", figures)
        write_page()
    print(text_table(scores), end="\n\n")
    if any(score.figures for score in scores):
        print("\n".join(goal_table(figures)))
    for line in json_lines(scores):
        print(line)
    return 0 if any(score.figures for score in scores) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="ROWS.jsonl", help="default: all")
    parser.add_argument("--json-out", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--write-docs", action="store_true", help="write docs/accuracy.md too")
    parser.add_argument(
        "--keep-others", action="store_true", help="keep what is stored of all other rows"
    )
    parser.add_argument("--jobs", type=_count, default=2, help="processes side by side (2)")
    parser.add_argument("--only", action="append", metavar="ID", help="this row; may be repeated")
    return parser


def _beside_others(scores: Sequence[Score]) -> tuple[Score, ...]:
    """Return the scores of all rows, in the order of the files; those not scored now as stored."""
    rows = {row.id: row for path in sorted(_ROWS.glob("*.jsonl")) for row in read_rows(path)}
    found = {each.row.id: each for each in stored_scores(load_result("accuracy_gpu"), rows)}
    found |= {each.row.id: each for each in scores}
    return tuple(found[name] for name in (*rows, *(found.keys() - rows.keys())) if name in found)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        msg = f"{text!r} is no number of processes; give 1 or more"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def _read(files: Sequence[Path], only: Sequence[str] | None) -> list[tuple[Place, Row]]:
    """Read all rows with their places.

    Raises:
        MemfitError: if a file is malformed, or there is no row to score.
    """
    placed = [
        ((path, position), row)
        for path in files
        for position, row in enumerate(read_rows(path))
        if only is None or row.id in only
    ]
    missing = set(only or ()) - {row.id for _, row in placed}
    if missing or not placed:
        what = f"no row {' or '.join(sorted(missing))}" if missing else "no rows"
        msg = f"There are {what} in {', '.join(map(str, files))}. Name a file or a row that exists."
        raise UsageError(msg)
    return placed


def _answers(placed: Sequence[tuple[Place, Row]], num_processes: int) -> list[Answer]:
    """Predict all rows, and show on stderr how far that has come."""
    answers: dict[int, Answer] = {}
    places = [place for place, _ in placed]
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("rows", total=len(places))
        for position, found in predict_rows(places, num_processes):
            row = placed[position][1]
            if isinstance(found, str):
                answers[position] = Answer(row=row, failure=found)
                said = found
            else:
                answers[position] = Answer(row=row, predicted=found)
                said = format_seconds(found.seconds)
            progress.console.print(f"{row.id}: {said}", markup=False, highlight=False)
            progress.advance(task)
    return [answers[position] for position in range(len(placed))]


if __name__ == "__main__":
    sys.exit(main())
