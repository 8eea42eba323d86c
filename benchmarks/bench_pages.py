"""How large pages are, and how long a browser takes to open them.

Of a job of three modules, of one of two thousand, and of a run of very many steps and events.

Run: python benchmarks/bench_pages.py [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import page_jobs
from results_file import save_result

import memfit
from memfit.cli.main import main as memfit_main
from memfit.files import write_atomically
from memfit.journal.folder import JournalWriter
from memfit.journal.records import Ending, LeakEvent, Reason, RunFacts, StepRecord
from memfit.reports.charts.embedding import charts_of
from memfit.units import MIB

_JOBS = Path(page_jobs.__file__)
_NUM_STEPS = {"small": 200, "large": 3}
_CARDS = "t4,l4,a100-40gb,h100-80gb"
_BATCH_SIZES = {"small": "8,64,256,1024", "large": "256"}
_BUDGETS = {"small": "1MiB", "large": "700MiB"}
_PLAN = """memfit_plan: 1
strategies:
- name: micro-batching
  micro_batch_size: 3
"""
_PLANNING = {"small": [], "large": ["--seconds", "20", "--no-prove"]}
_PROVING = {"small": [], "large": ["--plan", "plan.yaml"]}
"""Of the large job one plan is proved, and one looked for: all of them take minutes."""
_MANY = 100_000
_WIDTHS = (420, 1600)
_NUM_LOADS = 3


def main() -> None:
    """Write each page, and note its size; the pages may be kept to be looked at."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--keep",
        metavar="FOLDER",
        type=Path,
        help="where the pages stay; those that are there are not made again",
    )
    kept = parser.parse_args().keep
    with tempfile.TemporaryDirectory() as folder, _browser() as seconds_to_open:
        place = kept or Path(folder)
        rows = [
            _row(name, kind, path, seconds_to_open)
            for name in ("small", "large")
            for kind, path in _pages(name, place / name).items()
        ]
        long_runs = [_long_run(what, place / f"long-{what}") for what in ("steps", "events")]
    save_result(
        "pages",
        {"scripts_kilobytes": _scripts_kilobytes(), "rows": rows, "long_runs": long_runs},
    )


def _pages(name: str, folder: Path) -> dict[str, Path]:
    """Make the pages of a job, by their kind."""
    job, plan = f"{_JOBS}:{name}", folder / "plan.yaml"
    write_atomically(plan, _PLAN.encode())
    proving = [str(plan) if word == plan.name else word for word in _PROVING[name]]
    commands = {
        "prediction": ["predict", job],
        "plan": ["plan", job, "--budget", _BUDGETS[name], *_PLANNING[name]],
        "proof": ["verify", job, "--batch-size", "8", *proving],
        "cards": ["predict", job, "--device", _CARDS],
        "table": ["table", job, "--batch-sizes", _BATCH_SIZES[name]],
        "comparison": ["compare", f"{_JOBS}:small", job, "--tolerance", "1TiB"],
    }
    pages = {kind: folder / f"{kind}.html" for kind in commands}
    for kind, words in commands.items():
        if not pages[kind].exists() and memfit_main([*words, "--html", str(pages[kind])]):
            raise SystemExit(f"{' '.join(words)} failed.")
    run = folder / "run" / "report.html"
    if not run.exists():
        _train(getattr(page_jobs, name), run.parent, _NUM_STEPS[name])
        memfit_main(["report", str(run.parent)])
    return {**pages, "run": run}


def _row(
    name: str, kind: str, path: Path, seconds_to_open: Callable[[Path], float] | None
) -> dict[str, object]:
    return {
        "job": name,
        "page": kind,
        "kilobytes": round(path.stat().st_size / 1000),
        "open_seconds": None if seconds_to_open is None else round(seconds_to_open(path), 2),
    }


def _train(job: memfit.Job, folder: Path, num_steps: int) -> None:
    plan = memfit.Plan(prediction=memfit.predict(job))
    with memfit.start(job, plan, folder=folder) as run:
        for _ in range(num_steps):
            run.step(job.batch(job.batch_size))


def _long_run(what: str, folder: Path) -> dict[str, object]:
    """Write a journal of very many steps or events, and note what its page takes."""
    shutil.rmtree(folder, ignore_errors=True)
    num_steps, num_events = (_MANY, 100) if what == "steps" else (2000, _MANY)
    _write_journal(folder, num_steps, num_events)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "memfit", "report", str(folder)], check=True, capture_output=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "num_steps": num_steps,
        "num_events": num_events,
        "processor_seconds": round(seconds, 1),
        "kilobytes": round((folder / "report.html").stat().st_size / 1000),
    }


def _write_journal(folder: Path, num_steps: int, num_events: int) -> None:
    writer = JournalWriter(folder)
    writer.begin(
        RunFacts(
            title="long",
            command="long.py",
            device="cpu",
            started_at="2026-01-01T00:00:00+00:00",
            process_id=1,
        )
    )
    for number in range(1, num_steps + 1):
        writer.step(
            StepRecord(
                step=number,
                time_seconds=0.2 * number,
                step_seconds=0.2,
                peak_allocated_bytes=(1000 + number % 97) * MIB,
                peak_reserved_bytes=1100 * MIB,
                predicted_peak_bytes=1096 * MIB,
                allocator_retries=0,
                host_bytes=(2000 + number // 100) * MIB,
                micro_batch_size=32,
                num_samples=64,
            )
        )
    for number in range(num_events):
        writer.event(_leak(number))
    writer.end(
        Ending(
            reason=Reason.DONE, ended_by="done", exit_code=0, sentence="It has ended.", remedy=""
        )
    )


def _leak(number: int) -> LeakEvent:
    return LeakEvent(
        step=1 + number // 50,
        place="host",
        kind="list",
        holder=f"losses[{number}]",
        growth_bytes_per_step=64,
        total_growth_bytes=640,
        num_steps=10,
        source_line="long.py:12",
        chain=("long.py: losses", f"[{number}]"),
        sentence="It grows by one tensor in each step.",
    )


@contextmanager
def _browser() -> Iterator[Callable[[Path], float] | None]:
    """Give what tells how long a page takes to open; None without playwright or Chromium."""
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright  # noqa: PLC0415 - an extra
    except ImportError:
        binary = None
    if binary is None:
        yield None
        return
    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=binary, args=["--no-sandbox", "--disable-gpu"]
        )

        def seconds_to_open(path: Path) -> float:
            """Return the slower of the median times on a small and on a large screen."""
            found = []
            for width in _WIDTHS:
                times = []
                for _ in range(_NUM_LOADS):
                    page = browser.new_page(viewport={"width": width, "height": 900})
                    page.goto(path.resolve().as_uri())
                    times.append(page.evaluate(_LOADED) / 1000)
                    page.close()
                found.append(statistics.median(times))
            return max(found)

        yield seconds_to_open
        browser.close()


_LOADED = """() => new Promise((done) => requestAnimationFrame(() => setTimeout(
    () => done(performance.now()))))"""
"""Milliseconds from the beginning of loading until charts have been drawn once."""


def _scripts_kilobytes() -> int:
    charts = charts_of({"none": {}})
    assert charts is not None
    return round(sum(map(len, charts.scripts)) / 1000)


if __name__ == "__main__":
    main()
