"""The planner against everything it could have found: many jobs, five budgets each.

Run: python benchmarks/bench_planner_grid.py        (about an hour on two idle cores)
A job that is in benchmarks/results/planner_grid.json already is not run again without --again.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import write_page
from planner_grid.figures import faults, summary
from planner_grid.grid import Effort, run_job
from planner_grid.processor import calibrated_processor
from planner_grid.table import text_table
from planner_jobs import planner_jobs
from results_file import RESULTS, load_result, write_result

_NAME = "planner_grid"
_FRACTIONS = (1.0, 0.8, 0.6, 0.45, 0.3)
_QUICK_JOBS = ("lstm", "wide-mlp")
_QUICK_FRACTIONS = (0.8, 0.6)
_QUICK = Effort(most_recordings=20, most_plans=4, screening_rounds=1, final_rounds=3)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the jobs that are still to be run, and show all of them."""
    warnings.simplefilter("ignore")
    options = _parser().parse_args(argv)
    names = options.jobs or (_QUICK_JOBS if options.quick else list(planner_jobs()))
    with calibrated_processor():
        if options.quick:
            jobs = {name: _run(name, _QUICK_FRACTIONS, _QUICK) for name in names}
        else:
            jobs = _run_all(names, again=options.again)
    if not options.quick:
        write_page.main()
    print(text_table(jobs))
    found = list(faults(jobs))
    print("\n".join(found) or "all as promised")
    return 1 if found else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=_names, metavar="NAME,NAME", help="these alone")
    parser.add_argument("--again", action="store_true", help="run finished jobs again as well")
    parser.add_argument(
        "--quick", action="store_true", help="two jobs, two budgets, little care; nothing is kept"
    )
    return parser


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := sorted(set(names) - set(planner_jobs())):
        msg = f"there is no job {', '.join(unknown)}; there are {', '.join(planner_jobs())}"
        raise argparse.ArgumentTypeError(msg)
    return names


def _run_all(names: Sequence[str], *, again: bool) -> dict[str, Any]:
    """Run jobs and keep each as soon as it is finished; give all that are kept."""
    kept = load_result(_NAME)["jobs"] if (RESULTS / f"{_NAME}.json").exists() else {}
    for name in names:
        if again or name not in kept:
            kept[name] = _run(name, _FRACTIONS, Effort())
            jobs = {each: kept[each] for each in planner_jobs() if each in kept}
            write_result(_NAME, {"summary": summary(jobs), "jobs": jobs})
    return {each: kept[each] for each in planner_jobs() if each in kept}


def _run(name: str, fractions: Sequence[float], effort: Effort) -> dict[str, Any]:
    started = time.perf_counter()

    def say(stage: str) -> None:
        seconds = time.perf_counter() - started
        print(f"{name}: {stage} ({seconds:.0f} s)", file=sys.stderr, flush=True)

    found = run_job(planner_jobs()[name](), fractions, effort, say)
    say("finished")
    return found


if __name__ == "__main__":
    sys.exit(main())
