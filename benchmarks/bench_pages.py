"""How large pages are: of a job of three modules, and of one of two thousand.

Run: python benchmarks/bench_pages.py [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import page_jobs
from results_file import save_result

import memfit
from memfit.cli.main import main as memfit_main
from memfit.files import write_atomically
from memfit.reports.charts.embedding import charts_of

_JOBS = Path(page_jobs.__file__)
_NUM_STEPS = {"small": 200, "large": 3}
_SEARCHED = "small"
"""Of the large job one plan is proved: searching, and trying every strategy, takes minutes."""
_CARDS = "t4,l4,a100-40gb,h100-80gb"
_PLAN = """memfit_plan: 1
strategies:
- name: micro-batching
  micro_batch_size: 3
"""


def main() -> None:
    """Write each page, and note its size; the pages may be kept to be looked at."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="where the pages stay")
    kept = parser.parse_args().keep
    with tempfile.TemporaryDirectory() as folder:
        place = kept or Path(folder)
        rows = [row for name in ("small", "large") for row in _rows(name, place / name)]
    save_result("pages", {"scripts_kilobytes": _scripts_kilobytes(), "rows": rows})


def _rows(name: str, folder: Path) -> list[dict[str, object]]:
    job, plan = f"{_JOBS}:{name}", folder / "plan.yaml"
    write_atomically(plan, _PLAN.encode())
    pages = {
        "prediction": ["predict", job],
        "plan": ["plan", job, "--budget", "1MiB"],
        "proof": ["verify", job, "--batch-size", "8"],
        "cards": ["predict", job, "--device", _CARDS],
        "comparison": ["compare", f"{_JOBS}:small", job, "--tolerance", "1TiB"],
    }
    if name != _SEARCHED:
        del pages["plan"]
        pages["proof"] += ["--plan", str(plan)]
    rows = []
    for kind, words in pages.items():
        path = folder / f"{kind}.html"
        if memfit_main([*words, "--html", str(path)]):
            raise SystemExit(f"{' '.join(words)} failed.")
        rows.append(_row(name, kind, path))
    run_folder = folder / "run"
    _train(getattr(page_jobs, name), run_folder, _NUM_STEPS[name])
    memfit_main(["report", str(run_folder)])
    return [*rows, _row(name, "run", run_folder / "report.html")]


def _row(name: str, kind: str, path: Path) -> dict[str, object]:
    return {"job": name, "page": kind, "kilobytes": round(path.stat().st_size / 1000)}


def _train(job: memfit.Job, folder: Path, num_steps: int) -> None:
    plan = memfit.Plan(prediction=memfit.predict(job))
    with memfit.start(job, plan, folder=folder) as run:
        for _ in range(num_steps):
            run.step(job.batch(job.batch_size))


def _scripts_kilobytes() -> int:
    charts = charts_of({"none": {}})
    assert charts is not None
    return round(sum(map(len, charts.scripts)) / 1000)


if __name__ == "__main__":
    main()
