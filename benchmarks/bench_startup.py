"""How long ``memfit --help`` takes, as a whole process.

Run: python benchmarks/bench_startup.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from results_file import save_result

_NUM_RUNS = 15
_PROBE = """
import sys
from memfit.cli.main import main
main(["--help"])
print("torch" in sys.modules)
"""


def main() -> None:
    """Time the command, and look at what it imports."""
    seconds = []
    for _ in range(_NUM_RUNS):
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "memfit", "--help"], check=True, stdout=subprocess.DEVNULL
        )
        seconds.append(time.perf_counter() - started)
    shown = subprocess.run(
        [sys.executable, "-c", _PROBE], check=True, capture_output=True, text=True
    )
    save_result(
        "startup",
        {
            "help_median_seconds": round(statistics.median(seconds), 3),
            "help_longest_seconds": round(max(seconds), 3),
            "imports_torch": shown.stdout.splitlines()[-1] == "True",
        },
    )


if __name__ == "__main__":
    main()
