"""Runs all planted or all clean programs, each with a finder of its own, and prints what was found.

Run: python benchmarks/leak_programs/run_all.py planted [SHARE [NAME ...]]     (or: clean)

SHARE is that of the time that the finder may take; 1 if not given. Names choose programs.

In a process of its own, since the finder looks at everything that Python holds: among a thousand
tests that is a lot.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from memfit.observe.leaks import LeakFinder

sys.path.insert(0, str(Path(__file__).parent.parent))


def main(kind: str, share: str = "1", *names: str) -> None:
    """Print one JSON object: by the program's name what was told, and the text of its lines."""
    programs = getattr(importlib.import_module(f"leak_programs.{kind}"), kind.upper())
    if names:
        programs = [program for program in programs if program.run.__name__ in names]
    training = importlib.import_module("leak_programs.training")
    found = {}
    for program in programs:
        gc.collect()
        told = []
        finder = LeakFinder(told.append, overhead_fraction=float(share))
        program.run(finder)
        assert tuple(told) == finder.findings, program.run.__name__
        found[program.run.__name__] = [
            {**asdict(event), "line_text": training.text_of_line(event.source_line)}
            for event in told
        ]
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
