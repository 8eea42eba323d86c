"""What the leak finder says of programs that it was not tuned on.

Run: python benchmarks/bench_leaks_heldout.py after_fixes        (five minutes on a quiet machine)

Each program is a process of its own: most below ``memfit run``, some with ``memfit.start`` in them,
all at default settings. ``first_run`` was written once, before the finder or a program was changed,
and stays as it is; ``--only NAME ...`` prints the rows of some programs and writes nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from leaks_heldout.scoring import Score, programs, score, summary
from results_file import RESULTS, load_result, write_result

NAME = "leaks_heldout"


def main() -> None:
    """Run the programs one after the other and write the score."""
    parser = argparse.ArgumentParser(description="Score the leak finder on programs new to it.")
    parser.add_argument("field", nargs="?", default="after_fixes")
    parser.add_argument("--only", nargs="*", default=())
    arguments = parser.parse_args()
    scores = _scores(arguments.only)
    if arguments.only:
        return
    found = summary(scores)
    kept = _kept()
    if arguments.field == "first_run" and "first_run" in kept:
        parser.error("the first run is written already, and there is only one")
    write_result(NAME, {**kept, arguments.field: found})
    print({key: value for key, value in found.items() if key != "rows"})


def _scores(only: list[str]) -> list[Score]:
    scores = []
    for program in programs():
        if only and program.name not in only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            scores.append(score(program, Path(folder) / "run"))
        print(scores[-1], flush=True)
    return scores


def _kept() -> dict[str, Any]:
    if not (RESULTS / f"{NAME}.json").exists():
        return {}
    result = load_result(NAME)
    return {key: result[key] for key in ("first_run", "after_fixes") if key in result}


if __name__ == "__main__":
    main()
