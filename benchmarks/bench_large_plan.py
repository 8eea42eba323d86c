"""How long `memfit plan` takes for a large model on a GPU that is not there, and when nothing fits.

Run: python benchmarks/bench_large_plan.py        (about seven minutes; whole commands are timed)
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from installed import compile_installed, user_environment
from results_file import save_result

from memfit.units import format_bytes

_HERE = Path(__file__).parent
_LARGE = f"{_HERE / 'large_llama.py'}:job"
_SMALL = f"{_HERE.parent / 'examples' / 'transformer.py'}:job"
_BUDGETS = (None, "110GiB", "80GiB", "66GiB", "20GiB")
_SMALL_BUDGET = "20MiB"


def main() -> None:
    """Plan at budgets from the whole card to what nothing fits in."""
    compile_installed(_HERE.parent)
    large = [_planned(_LARGE, "h200", budget) for budget in _BUDGETS]
    save_result("large_plan", {"large": large, "small": _planned(_SMALL, "cpu", _SMALL_BUDGET)})


def _planned(job: str, device: str, budget: str | None) -> dict[str, Any]:
    """Run one command, and give its exit code, its seconds and what it answered."""
    command = [sys.executable, "-m", "memfit", "plan", job, "--device", device, "--json"]
    if budget is not None:
        command += ["--budget", budget]
    started = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=user_environment({})
    )
    seconds = time.perf_counter() - started
    figures = {
        "job": Path(job).name,
        "device": device,
        "budget": budget,
        "exit_code": done.returncode,
        "seconds": round(seconds, 1),
        "answer": _plan_in(done.stdout) if done.returncode == 0 else _refusal_in(done.stderr),
    }
    print(json.dumps(figures), file=sys.stderr, flush=True)
    return figures


def _plan_in(output: str) -> str:
    plan = json.loads(output)
    peak_bytes = plan["prediction"]["process_bytes"]
    return f"{format_bytes(peak_bytes)} with {' + '.join(plan['prediction']['strategies'])}"


def _refusal_in(output: str) -> str:
    """Return the smallest peak and its holders, without the advice behind them."""
    said = " ".join(output.split())
    return said[said.find("The smallest peak") : said.find(" Raise the budget")]


if __name__ == "__main__":
    main()
