"""Predicts scripts as people write them, unchanged, and holds the figures against measured ones.

    python benchmarks/bench_scripts.py [NAME ...]

Each script of ``benchmarks/scripts`` is predicted in an empty folder, on the CPU and on a T4. On
the CPU each recorded step, the evaluation and the checkpoint are compared with what the allocator
reported of the script's own run (``benchmarks/scripts/measured.json``). What lies in the folder
afterwards is counted: there should be nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure_scripts import environment_of, module_of
from results_file import load_result, write_result

_SCRIPTS = Path(__file__).parent / "scripts"
_DEVICES = ("cpu", "t4")
_PHASES = {
    "load": "load_peak_bytes",
    "evaluation": "evaluation_peak_bytes",
    "checkpoint": "checkpoint_peak_bytes",
}


def main(names: list[str]) -> int:
    """Predict the scripts of these names, or all, and keep the figures."""
    measured = {row["script"]: row for row in json.loads((_SCRIPTS / "measured.json").read_text())}
    rows = {row["script"]: row for row in known_rows("scripts")}
    for name in names or measured:
        rows[name] = {"script": name, **_row(name, measured[name])}
        print(json.dumps(rows[name]), flush=True)
        write_result("scripts", {"rows": [rows[each] for each in measured if each in rows]})
    return 0


def known_rows(name: str) -> list[dict[str, Any]]:
    """Return the rows that a benchmark has kept so far."""
    try:
        return list(load_result(name)["rows"])
    except FileNotFoundError:
        return []


def _row(name: str, measured: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"arguments": measured["arguments"]}
    for device in _DEVICES:
        row[device] = _predicted(name, measured["arguments"], device)
    found = row["cpu"]
    if "error" not in found:
        real_peaks = measured.get("step_peak_bytes", [measured["first_step_peak_bytes"]])
        steps = list(zip(found["step_peaks_bytes"], real_peaks, strict=False))
        row["step_errors"] = [predicted / real - 1 for predicted, real in steps]
        row["worst_step_error"] = max(row["step_errors"], key=abs)
        row["phase_errors"] = {
            phase: found["phases"][phase] / measured[field] - 1
            for phase, field in _PHASES.items()
            if phase in found["phases"] and measured.get(field)
        }
    return row


def _predicted(name: str, arguments: list[str], device: str) -> dict[str, Any]:
    """Predict one script in an empty folder, by the command that a user types."""
    command = [sys.executable, "-m", "memfit", "predict", *module_of(name)]
    command += ["--device", device, "--json", "--", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as failed:
            process = subprocess.Popen(
                command, cwd=folder, env=environment_of(name), stdout=said, stderr=failed
            )
            # Of the process and of the one in which it recorded, whichever took more.
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            said.seek(0)
            failed.seek(0)
            output, errors = said.read(), failed.read()
        seconds = time.perf_counter() - started
        left = sum(1 for _ in Path(folder).rglob("*"))
    figures = {"seconds": round(seconds, 1), "num_files_left": left}
    if process.returncode not in (0, 3):
        return {**figures, "error": errors.strip().splitlines()[-1:]}
    answer = json.loads(output)
    return {
        **figures,
        "resident_bytes": used.ru_maxrss * 1024,
        "peak_allocated_bytes": answer["peak_allocated_bytes"],
        "process_bytes": answer["process_bytes"],
        "step_peaks_bytes": answer["step_peaks_bytes"],
        "phases": {each["phase"]: each["peak_allocated_bytes"] for each in answer["phases"]},
        "host": {each["phase"]: each["host_peak_bytes"] for each in answer["phases"]},
        "num_answers": len(answer["answers"]),
        "num_diverted_files": answer["num_diverted_files"],
        "skewed_peak_bytes": answer["skewed_peak_bytes"],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
