"""The planner against everything it could have found: many jobs, five budgets each.

Run: python benchmarks/bench_planner_grid.py                (about 100 minutes on two idle cores)
     python benchmarks/bench_planner_grid.py --held-out     (about 40: other jobs, three budgets)
A job that is in the results already is not run again without --again.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import write_page
from planner_grid.figures import faults, summary
from planner_grid.grid import Effort, run_job
from planner_grid.processor import calibrated_processor
from planner_grid.table import text_table
from planner_held_out import held_out_jobs
from planner_jobs import planner_jobs
from results_file import RESULTS, load_result, write_result

from memfit import Job

Jobs = Mapping[str, Callable[[], Job]]


@dataclass(frozen=True, slots=True)
class _Grid:
    """Jobs, and the budgets of each as parts of the peak of the job as it is."""

    name: str
    jobs: Jobs
    fractions: Sequence[float]


_TUNED = _Grid("planner_grid", planner_jobs(), (1.0, 0.8, 0.6, 0.45, 0.3))
_HELD_OUT = _Grid("planner_held_out", held_out_jobs(), (0.8, 0.6, 0.4))
_QUICK_JOBS = ("lstm", "wide-mlp")
_QUICK_FRACTIONS = (0.8, 0.6)
_QUICK = Effort(most_recordings=20, most_plans=4, screening_rounds=1, final_rounds=2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the jobs that are still to be run, and show all of them."""
    warnings.simplefilter("ignore")
    parser = _parser()
    options = parser.parse_args(argv)
    grid = _HELD_OUT if options.held_out else _TUNED
    names = options.jobs or (_QUICK_JOBS if options.quick else list(grid.jobs))
    if unknown := sorted(set(names) - set(grid.jobs)):
        parser.error(f"there is no job {', '.join(unknown)}; there are {', '.join(grid.jobs)}")
    with calibrated_processor():
        if options.quick:
            jobs = {name: _run(name, grid.jobs[name](), _QUICK_FRACTIONS, _QUICK) for name in names}
        else:
            jobs = _run_all(grid, names, again=options.again)
    if not options.quick:
        write_page.main()
    print(text_table(jobs))
    found = list(faults(jobs))
    print("\n".join(found) or "all as promised")
    return 1 if found else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=_names, metavar="NAME,NAME", help="these alone")
    parser.add_argument(
        "--held-out", action="store_true", help="jobs that nothing was corrected by"
    )
    parser.add_argument("--again", action="store_true", help="run finished jobs again as well")
    parser.add_argument(
        "--quick", action="store_true", help="two jobs, two budgets, little care; nothing is kept"
    )
    return parser


def _names(text: str) -> list[str]:
    return text.split(",")


def _run_all(grid: _Grid, names: Sequence[str], *, again: bool) -> dict[str, Any]:
    """Run jobs and keep each as soon as it is finished; give all that are kept."""
    is_kept = (RESULTS / f"{grid.name}.json").exists()
    kept = load_result(grid.name)["jobs"] if is_kept else {}
    for name in names:
        if again or name not in kept:
            kept[name] = _run(name, grid.jobs[name](), grid.fractions, Effort())
            jobs = {each: kept[each] for each in grid.jobs if each in kept}
            write_result(grid.name, {"summary": summary(jobs), "jobs": jobs})
    return {each: kept[each] for each in grid.jobs if each in kept}


def _run(name: str, job: Job, fractions: Sequence[float], effort: Effort) -> dict[str, Any]:
    started = time.perf_counter()

    def say(stage: str) -> None:
        seconds = time.perf_counter() - started
        print(f"{name}: {stage} ({seconds:.0f} s)", file=sys.stderr, flush=True)

    found = run_job(job, fractions, effort, say)
    say("finished")
    return found


if __name__ == "__main__":
    sys.exit(main())
