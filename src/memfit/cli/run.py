"""``memfit run``: any training command, unchanged, watched from its start to its end."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from memfit.errors import DataError, UsageError
from memfit.journal.printable import printable

from .command import Command, add_json_argument

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.watch.command import WatchedRun


class RunCommand:
    """Run a training command unchanged, watch it, and say why it ended.

    What follows `--` is started as it is: python, torchrun, accelerate launch, a shell script.
    Its input and output are its own, and its exit code becomes that of memfit (128 and the number
    of the signal if one killed it). A folder gets its steps, its leaks and, in reason.json, why it
    ended. With --json the last line on standard output is one JSON object.
    """

    example = "memfit run --budget 2GiB -- python train.py --epochs 3"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options and the command."""
        parser.add_argument(
            "--budget",
            metavar="BYTES",
            help="what each process may allocate with torch, for example 2GiB; more is an "
            "out-of-memory error (on cpu this costs a Python call per operator)",
        )
        parser.add_argument(
            "--fit",
            action="store_true",
            help="plan and guard the trainings of Trainers inside, Lightning or transformers, for "
            "--budget if given",
        )
        parser.add_argument(
            "--allow",
            metavar="NAME",
            action="append",
            default=[],
            help="with --fit, allow a strategy that changes results, such as bf16; may be repeated",
        )
        parser.add_argument(
            "--allow-unplanned",
            action="store_true",
            help="with --fit and --budget, train all the same what cannot be planned",
        )
        parser.add_argument(
            "--folder", type=Path, metavar="DIR", help="where to write; by default one in runs/"
        )
        parser.add_argument(
            "--overwrite", action="store_true", help="replace the run that lies in --folder"
        )
        parser.add_argument("--no-leaks", action="store_true", help="do not look for leaks")
        parser.add_argument("--quiet", action="store_true", help="write no lines at the end")
        add_json_argument(parser)
        parser.add_argument(
            "words", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="what to run"
        )

    def run(self, args: argparse.Namespace, console: Console) -> int:
        """Run the command, and give its exit code."""
        del console
        from memfit.watch.command import watch_command

        words = args.words[1:] if args.words[:1] == ["--"] else args.words
        if not words:
            msg = "A command is needed, as in `memfit run -- python train.py`."
            raise UsageError(msg)
        if (args.allow or args.allow_unplanned) and not args.fit:
            msg = "--allow is for --fit, which plans; without it nothing is changed."
            raise UsageError(msg)
        budget_bytes = _budget_bytes(args.budget)
        refuses = budget_bytes is not None and not args.allow_unplanned
        fit = {"budget": budget_bytes, "allow": args.allow, "refuses": refuses}
        run = watch_command(
            words,
            folder=args.folder,
            budget_bytes=None if args.fit else budget_bytes,
            fit=fit if args.fit else None,
            finds_leaks=not args.no_leaks,
            overwrite=args.overwrite,
        )
        if not args.quiet:
            _write_lines(sys.stderr, (printable(f"memfit: {line}") for line in _closing_lines(run)))
        if args.json:
            # One line: what the command has written to standard output stands before it.
            result = {**asdict(run.ending), "folder": str(run.folder)}
            _write_lines(sys.stdout, [json.dumps(result, allow_nan=False)])
        return run.ending.exit_code


COMMAND: Command = RunCommand()
_MOST_EVENTS = 5


def _budget_bytes(text: str | None) -> int | None:
    from memfit.units import parse_bytes

    if text is None:
        return None
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"--budget: {error}.") from None


def _write_lines(stream: TextIO | None, lines: Iterable[str]) -> None:
    """Write lines; a stream that takes none is no reason to lose the command's exit code."""
    if stream is None:  # it was closed before memfit was started
        return
    try:
        stream.writelines(f"{line}\n" for line in lines)
        stream.flush()
    except OSError:
        # Python would flush once more at exit, fail again and give an exit code of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _closing_lines(run: WatchedRun) -> Iterator[str]:
    """Yield what the terminal shows when the command has ended."""
    from memfit.units import format_bytes
    from memfit.watch.ending import leak_line

    ending = run.ending
    yield f"{ending.reason.value}: {ending.sentence}"
    if ending.unplanned:
        yield f"WITHOUT A PLAN: {ending.unplanned}"
    peaks = {"allocated": ending.peak_allocated_bytes, "resident": ending.host_peak_bytes}
    known = [f"{format_bytes(value)} {name}" for name, value in peaks.items() if value]
    if known:
        yield f"peak: {', '.join(known)}"
    for noted in ending.evidence:
        yield f"noted: {noted}"
    yield from _events(run.folder)
    for leak in ending.leaks:
        yield f"leak: {leak_line(leak)}"
    if run.lost:
        yield f"lost: {'; '.join(run.lost)}"
    if ending.remedy:
        yield f"next: {ending.remedy}"
    yield f"all of it: {run.folder}; to read it: memfit report {run.folder}"


def _events(folder: Path) -> Iterator[str]:
    """Yield what a guarded run inside the command went through, the latest of it."""
    from memfit.journal.folder import read_ranks
    from memfit.journal.records import LeakEvent
    from memfit.journal.sentences import event_sentence

    try:
        journals = read_ranks(folder).values()
    except (DataError, OSError):  # a part that cannot be read is no reason to lose the exit code
        return
    events = [event for journal in journals for event in journal.events]
    told = [event_sentence(event) for event in events if not isinstance(event, LeakEvent)]
    if len(told) > _MOST_EVENTS:
        yield f"{len(told)} events, the last of them:"
    yield from told[-_MOST_EVENTS:]
