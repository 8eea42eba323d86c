"""Break things at random in small trainings and commands, and see whether what is promised holds.

Each run is drawn from its number: a job, a plan, how it is saved, and what befalls it. A run is a
violation where its state is not that of the undisturbed run, an error does not name what was wrong,
a file is neither old nor new, or a process is left behind. It is printed with the command that
replays it. Linux on x86-64 alone.

    python benchmarks/chaos.py --runs 2000 --seed 1           (about an hour on one core)
    python benchmarks/chaos.py --seconds 36000 --workers 2 --seed 7
    python benchmarks/chaos.py --replay 1000042 --keep /tmp/run
    python benchmarks/chaos.py --minimise 1000042
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: children are forked

from chaos_runs.carrying_out import carried_out, prepared
from chaos_runs.minimise import minimised
from chaos_runs.outcomes import Outcome
from chaos_runs.stories import KINDS, Story, draw
from chaos_runs.system_calls import can_be_watched
from chaos_runs.tally import Row, row_of, tallied

_NUMBERS_OF_A_SEED = 1_000_000
_SHOWN_EVERY_SECONDS = 30.0


def main() -> int:
    """Carry out runs; the exit code is 1 if a promise was broken."""
    args = _parser().parse_args()
    if args.tally is not None:
        return _told(args, _read(args.tally))
    if not can_be_watched():
        print("Nothing is done: processes are watched on Linux on x86-64 alone.")
        return 0
    if args.replay is not None or args.minimise is not None or args.story is not None:
        return _one(args)
    with tempfile.TemporaryDirectory() as name:
        args.rows = args.rows or Path(name, "rows.jsonl")
        if args.workers > 1 and args.worker is None:
            _have_carried_out(args)
        else:
            _carry_out(args)
        return 0 if args.worker is not None else _told(args, _read([args.rows]))


def _told(args: argparse.Namespace, rows: list[Row]) -> int:
    """Sum runs up, and keep that where it is asked for."""
    figures = {"seed": args.seed, **tallied(rows)}
    if args.json is not None:
        args.json.write_text(json.dumps(figures))
    if args.save:
        from results_file import write_result  # noqa: PLC0415 - with torch

        write_result("chaos", figures)
    print(json.dumps({key: value for key, value in figures.items() if key != "violations"}))
    return int(figures["num_violations"] > 0)


def _read(files: list[Path]) -> list[Row]:
    """Read the rows of runs, in the order of their numbers within each file."""
    lists = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [row for rows in lists for row in sorted(rows, key=lambda row: row["number"])]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--only", choices=KINDS, help="runs of this kind alone")
    parser.add_argument("--ranks", type=int, help="runs on so many ranks alone")
    parser.add_argument("--replay", type=int, metavar="NUMBER", help="one run again")
    parser.add_argument(
        "--minimise", type=int, metavar="NUMBER", help="make a run small that fails"
    )
    parser.add_argument("--story", type=Path, metavar="FILE", help="a run as --minimise prints it")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the files of a replayed run")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="add a line for each run")
    parser.add_argument(
        "--tally", type=Path, nargs="+", metavar="FILE", help="sum such lines up, and run nothing"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--save", action="store_true", help="keep them as results/chaos.json")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return parser


def _one(args: argparse.Namespace) -> int:
    """Carry out one run, and say all of it."""
    if args.story is not None:
        story = Story.from_json(json.loads(args.story.read_text()))
    else:
        story = draw(args.replay if args.minimise is None else args.minimise)
    prepared(story.kind)
    outcome = carried_out(story, keeps=args.keep)
    if args.minimise is not None and outcome.violations:
        outcome = minimised(outcome, carried_out)
    print(json.dumps(outcome.story.to_json()))
    for name in ("unusable", "struck", "ended", "violations"):
        print(f"{name}: {getattr(outcome, name)}")
    return int(bool(outcome.violations))


def _carry_out(args: argparse.Namespace) -> None:
    """Carry out runs here, one after the other."""
    prepared(args.only)
    began = shown = time.monotonic()
    num_done = num_broken = 0
    for number, story in _stories(args):
        now = time.monotonic()
        if num_done >= args.runs or now - began > args.seconds:
            break
        if now - shown > _SHOWN_EVERY_SECONDS:
            shown = now
            print(f"{num_done:,} runs, {num_broken:,} violations, {now - began:,.0f} s", flush=True)
        outcome = carried_out(story)
        with args.rows.open("a") as file:
            file.write(json.dumps(row_of(number, outcome)) + "\n")
        num_done += not outcome.unusable
        num_broken += bool(outcome.violations)
        _show(number, outcome)


def _stories(args: argparse.Namespace) -> Iterator[tuple[int, Story]]:
    number = args.seed * _NUMBERS_OF_A_SEED
    if args.worker is not None:
        number += args.worker
    while True:
        story = draw(number)
        if args.only in (None, story.kind) and args.ranks in (None, story.num_ranks):
            yield number, story
        number += args.workers if args.worker is not None else 1


def _show(number: int, outcome: Outcome) -> None:
    if not outcome.violations:
        return
    print(f"{outcome.story.kind}: python benchmarks/chaos.py --replay {number}")
    print(f"    met: {'; '.join(outcome.struck)}")
    print(f"    ended: {' | '.join(outcome.ended)}"[:600])
    for said in outcome.violations[:4]:
        print(f"    {said[:900]}", flush=True)


def _have_carried_out(args: argparse.Namespace) -> None:
    """Have other processes carry out every so many-th run."""
    words = [sys.executable, __file__, f"--seed={args.seed}", f"--workers={args.workers}"]
    words += [f"--runs={-(-args.runs // args.workers)}", f"--seconds={args.seconds}"]
    words += [f"--rows={args.rows}"]
    words += [f"--only={args.only}"] if args.only else []
    words += [f"--ranks={args.ranks}"] if args.ranks else []
    workers = [subprocess.Popen([*words, f"--worker={worker}"]) for worker in range(args.workers)]
    for worker in workers:
        worker.wait()


if __name__ == "__main__":
    sys.exit(main())
