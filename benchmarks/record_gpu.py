"""Records what training steps really take on the card of this machine, for the accuracy figures.

Run: PYTHONPATH=src python benchmarks/record_gpu.py        (about nine minutes; can be resumed)
Writes benchmarks/accuracy/rows/recorded_<card>.jsonl and a few memory snapshots. Run again, it goes
on with what is missing. `--list` shows what would be recorded, and
`--device cpu --only NAME` tries one entry without a card.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from typing import Any

from recording.matrix import Entry, all_entries, possible_entries, snapshot_names, varied
from recording.processes import ChildProcess, Job
from recording.rowfile import RowFile, card_slug, row_id
from recording.runner import ProbeError, Recording, Settings, probe_card
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

ACCURACY = Path(__file__).parent / "accuracy"
_PROCESSOR = {"device": "cpu"}


def main(words: Sequence[str] | None = None) -> int:
    """Record what is missing; gives 0 when nothing is left, 1 on an error, 130 on Ctrl-C."""
    args = _parser().parse_args(words)
    started = time.monotonic()
    possible = varied(possible_entries(all_entries()))
    entries = [each for each in possible if _is_asked(each, args.only)]
    if args.list:
        print("\n".join(entry.name for entry in entries))
        return 0
    if not entries:
        print(f"no entry is named {args.only!r}; --list shows all", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="memfit-record-") as folder:
        launch = _launcher(Path(folder))
        settings = Settings(
            device=args.device,
            deadline=started + args.minutes * 60,
            num_preparing=args.preparing,
            revision=args.revision or _revision(),
        )
        try:
            return _record(args, entries, launch, settings)
        except ProbeError as error:
            print(f"the card cannot be used: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("stopped; what was recorded is kept, run again to go on", file=sys.stderr)
            return 130


def _record(
    args: argparse.Namespace,
    entries: Sequence[Entry],
    launch: Callable[[Job], ChildProcess],
    settings: Settings,
) -> int:
    is_card = args.device == "cuda"
    probe = probe_card(launch, settings, time.monotonic) if is_card else _PROCESSOR
    rows = RowFile(args.out or _usual_path(probe["device"], is_card=is_card))
    done = rows.names() if args.retry_failed else rows.names() | rows.failed_names()
    left = [entry for entry in entries if row_id(probe["device"], entry) not in done]
    snapshots = snapshot_names(tuple(left), args.snapshots if is_card else 0)
    settings = _with_snapshots(settings, snapshots, args.snapshot_folder, probe["device"])
    with _Progress(len(left)) as report:
        recording = Recording(rows, launch, probe, settings, report=report)
        outcome = recording.run(left)
    print(
        f"{outcome.num_recorded} recorded, {outcome.num_failed} failed, {outcome.num_left} left, "
        f"{len(entries) - len(left)} were there: {rows.path}"
    )
    if not is_card and not args.out:
        print(rows.path.read_text("utf-8"))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, help="file of rows; by default by the card's name")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop before so long")
    parser.add_argument("--only", metavar="NAME", help="entries of this name; * stands for any")
    parser.add_argument("--list", action="store_true", help="list the entries and stop")
    parser.add_argument("--snapshots", type=int, default=6, help="memory snapshots to keep")
    parser.add_argument(
        "--snapshot-folder", type=Path, default=ACCURACY / "snapshots", help="where they are kept"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--preparing", type=int, default=4, help="entries that get ready at once")
    parser.add_argument("--revision", help="commit to write into rows; by default git's")
    parser.add_argument("--retry-failed", action="store_true", help="try what failed again")
    return parser


def _is_asked(entry: Entry, pattern: str | None) -> bool:
    return pattern is None or fnmatchcase(entry.name, pattern)


def _usual_path(device: str, *, is_card: bool) -> Path:
    if not is_card:
        return Path(tempfile.mkdtemp(prefix="memfit-try-")) / "rows.jsonl"
    return ACCURACY / "rows" / f"recorded_{card_slug(device)}.jsonl"


def _launcher(folder: Path) -> Callable[[Job], ChildProcess]:
    numbers = count()
    return lambda job: ChildProcess(job, folder / f"{next(numbers):03}-{job.name}")


def _with_snapshots(
    settings: Settings, names: Collection[str], folder: Path, device: str
) -> Settings:
    paths = {name: folder / f"{card_slug(device)}-{name}.pickle.gz" for name in names}
    return replace(settings, snapshots=paths)


def _revision() -> str | None:
    """Ask git for the commit; None where this is no checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


class _Progress:
    """Shows a line for each entry, and a bar where someone is watching."""

    def __init__(self, total: int) -> None:
        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns)
        self._task = self._bar.add_task("recording", total=total)

    def __enter__(self) -> Callable[[str, str], None]:
        """Begin."""
        self._bar.start()
        return self._report

    def __exit__(self, *_: Any) -> None:
        """End."""
        self._bar.stop()

    def _report(self, name: str, text: str) -> None:
        self._bar.console.print(f"{name}: {text}", markup=False, highlight=False, soft_wrap=True)
        self._bar.advance(self._task)


if __name__ == "__main__":
    sys.exit(main())
