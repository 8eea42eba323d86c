"""``memfit table``: a step at many batch sizes, settings and plans, recorded in advance."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import NoPlanFitsError, UsageError

from .command import Command, add_json_argument, write_json
from .job_arguments import add_budget_arguments, add_device_argument, status

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.prediction.recorded_table import Cell, TableQuestion

_INTERRUPTED = 130
_PLAIN = "plain"
_NOT_REACHED = "not recorded: it was ended before"


class TableCommand:
    """Predict a job at several batch sizes, settings and plans, as a table to move through.

    Every place of the table is recorded as it would run; nothing is interpolated. --set calls a
    function that gives a memfit.Job with each value of an argument, such as a sequence length.
    With Ctrl-C what is there is shown.
    """

    example = "memfit table examples/transformer.py:job --device t4 --batch-sizes 8,16,32"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the job, the device, and what is varied."""
        parser.add_argument(
            "job",
            metavar="FILE.py:NAME",
            help="a memfit.Job in a Python file, or a function that gives one",
        )
        add_device_argument(parser)
        parser.add_argument(
            "--batch-sizes",
            metavar="N[,N...]",
            help="effective batch sizes (default: the job's own)",
        )
        parser.add_argument(
            "--set",
            metavar="NAME=V[,V...]",
            action="append",
            default=[],
            help="call the function with each of these values; repeat it for other arguments",
        )
        parser.add_argument(
            "--plan",
            metavar="FILE",
            action="append",
            default=[],
            help="record under this plan (YAML) besides the step as it is; repeat it for others",
        )
        add_budget_arguments(parser)
        parser.add_argument("--html", metavar="FILE", help="write a page to move through")
        add_json_argument(parser)

    def run(self, args: argparse.Namespace, console: Console) -> int:
        """Record every place, and show them."""
        from memfit.files import write_atomically
        from memfit.prediction.recorded_table import cells_asked
        from memfit.reports.table_text import cells_table

        question = _question(args)
        settings = dict(_setting(words) for words in args.set)
        sizes = _batch_sizes(args.batch_sizes, question, settings)
        asked = cells_asked(sizes, settings, list(question.plans))
        cells, is_whole = _recorded(question, asked, console, is_quiet=args.json)
        device = question.device.name
        if args.html:
            from memfit.reports.table_html import table_html

            page = table_html(cells, job=args.job, device=device)
            write_atomically(Path(args.html), page.encode())
        if args.json:
            found = [cell.to_json() for cell in cells]
            write_json({"job": args.job, "device": device, "is_whole": is_whole, "cells": found})
        else:
            console.print(cells_table(cells, job=args.job, device=device))
            if args.html:
                console.print(f"Wrote {args.html}.", markup=False)
        if not is_whole:
            return _INTERRUPTED
        known = [cell.prediction for cell in cells if cell.prediction is not None]
        fits = any(prediction.fits is not False for prediction in known)
        return 0 if fits or not known else NoPlanFitsError.exit_code


COMMAND: Command = TableCommand()


def _question(args: argparse.Namespace) -> TableQuestion:
    """Load what all places have in common."""
    from memfit.devices.catalogue import load_device
    from memfit.job import load_target
    from memfit.prediction.budget import MemoryBudget, read_budget
    from memfit.prediction.importing import imported_on
    from memfit.prediction.recorded_table import TableQuestion
    from memfit.strategies.plan import Plan

    device = load_device(args.device)
    return TableQuestion(
        target=imported_on(device, load_target, args.job),
        device=device,
        budget=MemoryBudget(num_bytes=read_budget(args.budget), of=args.budget_of),
        plans={_PLAIN: Plan(), **{path: Plan.load(path) for path in args.plan}},
    )


def _recorded(
    question: TableQuestion, asked: Sequence[Cell], console: Console, *, is_quiet: bool
) -> tuple[list[Cell], bool]:
    """Record the places; with Ctrl-C those that are left say so."""
    from memfit.prediction.recorded_table import recorded_cells

    found: list[Cell] = []
    with status(console, "recording", quiet=is_quiet) as show:

        def tell(number: int, cell: Cell) -> None:
            where = f"batch size {cell.batch_size:,}, {cell.plan}"
            show(f"recording {number + 1} of {len(asked)}: {where}")

        try:
            found.extend(recorded_cells(question, asked, tell))
        except KeyboardInterrupt:
            if not found:
                raise
    left = [replace(cell, reason=_NOT_REACHED) for cell in asked[len(found) :]]
    return [*found, *left], not left


def _batch_sizes(
    words: str | None, question: TableQuestion, settings: dict[str, list[Any]]
) -> list[int]:
    """Read batch sizes; the job's own where none are given.

    Raises:
        UsageError: if they are no whole numbers of at least 1.
    """
    if words is None:
        first = {name: values[0] for name, values in settings.items()}
        return [question.job_with(first).batch_size]
    parts = [part.strip() for part in words.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        msg = f"--batch-sizes takes whole numbers of at least 1, such as 8,16,32, not {words!r}."
        raise UsageError(msg)
    return list(dict.fromkeys(map(int, parts)))


def _setting(words: str) -> tuple[str, list[Any]]:
    """Read the values of an argument: whole numbers, numbers, or else words.

    Raises:
        UsageError: if there is no name or no value.
    """
    name, _, values = words.partition("=")
    found = [_value(part.strip()) for part in values.split(",") if part.strip()]
    if not name.isidentifier() or not found:
        raise UsageError(
            f"--set takes NAME=VALUE[,VALUE...], such as length=128,256; not {words!r}."
        )
    return name, list(dict.fromkeys(found))


def _value(word: str) -> Any:
    for read in (int, float):
        try:
            return read(word)
        except ValueError:
            continue
    return word
