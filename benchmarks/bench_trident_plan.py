"""What `memfit plan` finds for TRIDENT-Net at its document's size, on a card of 40 GB.

36 frames of 720 x 1280, an effective batch of 16 clips, 39 GiB of the card and 70 GiB of the host.
The seconds are of the whole command.

Run: python benchmarks/bench_trident_plan.py     (some ten minutes on one core)
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from results_file import save_result

_ROOT = Path(__file__).parents[1]
_QUESTION = (
    "plan examples/trident_document.py:job --device a100-40gb --budget 39GiB "
    "--host-memory 70GiB --json"
)
_KEPT = (
    *("strategies", "numerics", "peak_allocated_bytes", "peak_reserved_bytes", "process_bytes"),
    *("step_seconds", "by_category", "fits", "budget_bytes"),
)
_MOST_HOLDERS = 5


def main() -> None:
    """Ask with and without bf16, and keep the answers."""
    rows = [_row([]), _row(["--allow", "bf16"])]
    save_result("trident_plan", {"question": _QUESTION, "rows": rows})


def _row(allowed: list[str]) -> dict[str, Any]:
    """Run the command as a user types it, and give its figures."""
    command = [sys.executable, "-m", "memfit", *_QUESTION.split(), *allowed]
    begin_seconds = time.perf_counter()
    ran = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, cwd=_ROOT)
    command_seconds = time.perf_counter() - begin_seconds
    prediction = json.loads(ran.stdout)["prediction"]
    return {
        "allowed": allowed[-1] if allowed else None,
        "exit_code": ran.returncode,
        "command_seconds": command_seconds,
        **{name: prediction[name] for name in _KEPT},
        "largest": prediction["largest"][:_MOST_HOLDERS],
    }


if __name__ == "__main__":
    main()
