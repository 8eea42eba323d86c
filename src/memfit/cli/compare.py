"""``memfit compare``: two predictions or two runs beside each other, with an exit code for CI."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from memfit.errors import MemfitError, NoPlanFitsError, UsageError
from memfit.journal.printable import printable

from .command import Command, add_json_argument, write_json
from .job_arguments import (
    add_budget_arguments,
    add_plan_argument,
    add_rank_arguments,
    status,
)
from .script_arguments import add_recording_arguments

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.peak_changes.comparison import Comparison, Tolerance
    from memfit.peak_changes.sides import Side


_TOP = 10
_PERCENT = re.compile(r"^\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*$")
_ERROR = "memfit: error: "
_ANSWERED = (0, NoPlanFitsError.exit_code)
_PREDICTED_WITH = {
    "--device": "device",
    "--ranks": "ranks",
    "--rank": "rank",
    "--devices-per-node": "devices_per_node",
    "--plan": "plan",
    "--allocator": "allocator",
}
"""The options that say how a side is predicted, with their names among the arguments."""
_PASSED_ON = {
    **_PREDICTED_WITH,
    "--budget": "budget",
    "--budget-of": "budget_of",
    "--steps": "steps",
    "--most-seconds": "most_seconds",
}


class CompareCommand:
    """Compare two peaks: by how much it moved, and which lines and modules moved it.

    BEFORE and AFTER are each a prediction saved by `memfit predict --save FILE`, the folder of a
    run, or a job or script that is predicted now, in a process of its own. Lines are matched by
    file, function and text, so that one that only moved is no change.

    The exit code is 0 where the peak does not rise by more than the tolerance, and 3 where it does,
    or where the second does not fit a budget that was given or that the first fits.
    """

    example = "memfit compare base.json head.json --tolerance 1%"
    takes_script_arguments = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the two sides, what is allowed, and how jobs are predicted."""
        for name in ("before", "after"):
            parser.add_argument(
                name,
                metavar=name.upper(),
                help="a saved prediction, the folder of a run, FILE.py:NAME or FILE.py",
            )
        parser.add_argument(
            "--tolerance",
            metavar="SIZE",
            help="how much the peak may rise, such as 64MiB or 1%% (default 0; 1%% where one side "
            "was measured)",
        )
        add_budget_arguments(parser)
        parser.add_argument(
            "--device",
            metavar="NAME",
            help="where a job would run, see `memfit devices`; by default that of the other side, "
            "else cpu",
        )
        add_rank_arguments(parser)
        add_plan_argument(parser)
        parser.add_argument(
            "--allocator",
            metavar="TEXT",
            help="what PYTORCH_ALLOC_CONF would hold, such as expandable_segments:True",
        )
        add_recording_arguments(parser)
        parser.add_argument(
            "--top",
            metavar="N",
            type=int,
            default=_TOP,
            help=f"how many lines and modules to name (default {_TOP})",
        )
        parser.add_argument("--html", metavar="PAGE", help="write a page about the comparison")
        add_json_argument(parser)

    def run(self, args: argparse.Namespace, console: Console) -> int:
        """Read or predict both sides, compare them and show what was found."""
        found = _comparison(args, console)
        if args.html:
            from memfit.files import write_atomically
            from memfit.reports.compare_html import compare_html

            write_atomically(Path(args.html), compare_html(found))
        if args.json:
            _write_json(found)
        else:
            from memfit.reports.compare_text import compare_report

            console.print(compare_report(found, top=args.top))
            if args.html:
                console.print(f"Wrote {args.html}.", markup=False)
        return NoPlanFitsError.exit_code if found.is_regression else 0


COMMAND: Command = CompareCommand()


def _comparison(args: argparse.Namespace, console: Console) -> Comparison:
    """Read and check the words, get both sides, and compare them."""
    from memfit.peak_changes.comparison import Comparison, default_tolerance
    from memfit.prediction.budget import read_budget

    if args.top < 1:
        raise UsageError(f"--top must be at least 1, not {args.top}.")
    tolerance = None if args.tolerance is None else _read_tolerance(args.tolerance)
    budget_bytes = read_budget(args.budget)
    before, after = _sides(args, console)
    if before.peak_of != after.peak_of:
        words = {"allocated": "what torch allocates", "host": "the memory of the host alone"}
        raise UsageError(
            f"{before.source} has measured {words[before.peak_of]} and {after.source} "
            f"{words[after.peak_of]}; name two that tell the same."
        )
    return Comparison(
        before=before,
        after=after,
        tolerance=tolerance or default_tolerance(before, after),
        budget_bytes=budget_bytes,
        budget_of=args.budget_of,
    )


def _sides(args: argparse.Namespace, console: Console) -> tuple[Side, Side]:
    """Get both sides; what is read is read first, so that a job is predicted where it was."""
    from memfit.reports.compared_sides import read_side

    words = (args.before, args.after)
    sides = [None if _is_predicted_now(word) else read_side(Path(word), word) for word in words]
    # Words that say how a job is predicted have no place where none is.
    given = [option for option, name in _PREDICTED_WITH.items() if getattr(args, name)]
    if args.script_arguments:
        given.append("--")
    if all(side is not None for side in sides) and given:
        raise UsageError(
            f"{given[0]} is for what is predicted now, and both sides are there already. "
            "Leave it out, or name FILE.py:NAME."
        )
    there = next((side for side in sides if side is not None), None)
    device = args.device or (there.device if there else "cpu")
    with (
        status(console, "predicting", quiet=args.json) as show,
        tempfile.TemporaryDirectory(prefix="memfit-compare-") as folder,
    ):
        file = _file_of_device(there, Path(folder)) if there and not args.device else None
        aside = _Aside(args=args, device=str(file or device), folder=Path(folder))
        for place, word in enumerate(words):
            if sides[place] is None:
                show(f"predicting {word} on {device}")
                found = read_side(aside.predict(word), word)
                # The file of the device is another one than the saved side had, of the same text.
                sides[place] = found if file is None else replace(found, device=device)
    before, after = sides
    assert before is not None, "it was read or predicted"
    assert after is not None, "it was read or predicted"
    return before, after


def _file_of_device(saved: Side, folder: Path) -> Path | None:
    """Write the file of a device of the user's own as it was when a prediction was saved."""
    if not saved.device_file:
        return None
    from memfit.files import write_atomically

    path = folder / "device.toml"
    write_atomically(path, saved.device_file)
    return path


def _read_tolerance(words: str) -> Tolerance:
    """Read a size, or a percentage.

    Raises:
        UsageError: if it is neither.
    """
    from memfit.peak_changes.comparison import Tolerance
    from memfit.units import parse_bytes

    if percent := _PERCENT.match(words):
        return Tolerance(fraction=float(percent[1]) / 100)
    try:
        return Tolerance(num_bytes=parse_bytes(words))
    except ValueError as error:
        raise UsageError(f"--tolerance: {error}; or as a percentage such as 1%.") from error


def _write_json(found: Comparison) -> None:
    from memfit.reports.compare_wording import budget_sentence, notes, verdict_sentence

    sentences = [verdict_sentence(found), budget_sentence(found)]
    write_json(
        {
            **found.to_json(),
            "sentences": [each for each in sentences if each],
            "notes": notes(found),
        }
    )


def _is_predicted_now(word: str) -> bool:
    """Return whether a word names a job or a script rather than a file or folder to be read."""
    return word.partition(":")[0].endswith(".py") and not Path(word).is_dir()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Aside:
    """How the sides are predicted, each in a process of its own.

    Two versions of one project have modules of the same names; in one process the second would be
    given the modules of the first.
    """

    args: argparse.Namespace
    device: str
    folder: Path
    """Where predictions are written."""

    def predict(self, word: str) -> Path:
        """Predict a job or a script, and give the file that holds the prediction.

        Raises:
            UsageError: if the words of the command make no sense for it.
            MemfitError: if it cannot be predicted.
        """
        with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".json", delete=False) as file:
            path = Path(file.name)
        path.unlink()
        done = subprocess.run(
            [sys.executable, "-P", "-m", "memfit", *self._words(word, path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode in _ANSWERED and path.exists():
            return path
        if self.args.debug:
            sys.stderr.write(printable(done.stderr))
        message = f"{word}: {_last_error(done.stderr, done.returncode)}"
        raise (UsageError if done.returncode == UsageError.exit_code else MemfitError)(message)

    def _words(self, word: str, path: Path) -> Iterator[str]:
        """Give the words of ``memfit predict``."""
        yield from ("predict", word, "--save", str(path))
        for option, name in _PASSED_ON.items():
            value = self.device if name == "device" else getattr(self.args, name)
            if value:
                yield f"{option}={value}"
        for kind in self.args.allow_outside:
            yield f"--allow-outside={kind}"
        if self.args.debug:
            yield "--debug"
        if self.args.script_arguments:
            yield from ("--", *self.args.script_arguments)


def _last_error(output: str, exit_code: int) -> str:
    """Return why a prediction failed."""
    lines = [line for line in output.splitlines() if _ERROR in line]
    if lines:
        return lines[-1].rpartition(_ERROR)[2]
    return f"its prediction ended with exit code {exit_code}. `memfit predict` alone shows why."
