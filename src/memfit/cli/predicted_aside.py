"""Predicts a side of a comparison in a process of its own.

Two versions of one project have modules of the same names; in one process the second would be
given the modules of the first.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memfit.errors import MemfitError, NoPlanFitsError, UsageError
from memfit.journal.printable import printable

_ERROR = "memfit: error: "
_ANSWERED = (0, NoPlanFitsError.exit_code)
PREDICTED_WITH = {
    "--device": "device",
    "--ranks": "ranks",
    "--rank": "rank",
    "--devices-per-node": "devices_per_node",
    "--plan": "plan",
    "--allocator": "allocator",
}
"""The options that say how a side is predicted, with their names among the arguments."""
_PASSED_ON = {
    **PREDICTED_WITH,
    "--budget": "budget",
    "--budget-of": "budget_of",
    "--steps": "steps",
    "--most-seconds": "most_seconds",
}


def is_predicted_now(word: str) -> bool:
    """Return whether a word names a job or a script rather than a file or folder to be read."""
    return word.partition(":")[0].endswith(".py") and not Path(word).is_dir()


@dataclass(frozen=True, slots=True, kw_only=True)
class Aside:
    """How the sides are predicted."""

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
