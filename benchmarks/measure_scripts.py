"""Runs scripts as people write them, for real, and keeps the peaks that the CPU allocator reports.

    python benchmarks/measure_scripts.py [NAME ...]

Each script of ``benchmarks/scripts`` (a package is named by its folder and a slash) runs on the CPU
with one thread, in an empty folder and a process of its own, under a watch that is on from before
its first line. Steps, evaluation and checkpoints are told apart as in a prediction. What was
measured goes to ``benchmarks/scripts/measured.json``.
"""

from __future__ import annotations

import bisect
import importlib
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from memfit.observe.allocator_events import AllocatorWatch
from memfit.script.steps import StepCounter

_SCRIPTS = Path(__file__).parent / "scripts"
_MEASURED = _SCRIPTS / "measured.json"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
_MARK = "script:"
_NEVER = 10**9
_WRITERS = (("torch", "save"), ("torch.serialization", "save"))
_FLAT_WRITERS = (("safetensors.torch", "save_file"), ("safetensors.torch", "serialize_file"))


def main(names: list[str]) -> int:
    """Measure the scripts of these names, or all, and keep the figures."""
    rows = {row["script"]: row for row in json.loads(_MEASURED.read_text("utf-8"))}
    for name in names or list(rows):
        row = {"script": name, **_measured(name, rows.get(name, {}).get("arguments", []))}
        rows[name] = {**rows.get(name, {}), **row}
        print(json.dumps(row), flush=True)
        text = ",\n  ".join(json.dumps(each) for each in rows.values())
        _MEASURED.write_text(f"[\n  {text}\n]\n", "utf-8")
    return 0


def module_of(name: str) -> tuple[str, ...]:
    """Return how a script is named to Python: a path, or ``-m`` and a package's module."""
    if name.endswith("/"):
        return "-m", f"{name.rstrip('/')}.train"
    path = _SCRIPTS / name
    return (str(path if path.exists() else _SCRIPTS / "attack" / name),)


def environment_of(name: str) -> dict[str, str]:
    """Return the environment in which a script runs with one thread; packages are found."""
    found = {**os.environ, **_ONE_THREAD}
    if name.endswith("/"):
        places = [str(_SCRIPTS / "attack"), found.get("PYTHONPATH", "")]
        found["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    return found


def _measured(name: str, arguments: list[str]) -> dict[str, Any]:
    """Run one script in an empty folder, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "measured.json"
        work = Path(folder) / "work"
        work.mkdir()
        command = [sys.executable, __file__, "--inside", str(result), *module_of(name), *arguments]
        subprocess.run(command, cwd=work, env=environment_of(name), stdout=sys.stderr, check=True)
        return {"arguments": arguments, "threads": 1, **json.loads(result.read_text("utf-8"))}


def run_inside(result: str, target: list[str]) -> None:
    """Run a script in this process, watched, and write what was measured."""
    time_of_marks = _Marks()
    started = time.process_time()
    with AllocatorWatch() as watch, ExitStack() as stack:
        counter = stack.enter_context(StepCounter(time_of_marks, _NEVER, float(_NEVER)))
        for module, writer in _written_by():
            stack.enter_context(patch(f"{module}.{writer}", _noted(module, writer, counter)))
        _run(target)
    seconds = time.process_time() - started
    times, totals = [], [0]
    for event in watch.events():
        times.append(event.time_ns)
        totals.append(totals[-1] + event.num_bytes)
    at = {0: 0} | {int(name): time_ns for time_ns, name in watch.marks(_MARK)}
    peaks: dict[str, list[int]] = {}
    for span in counter.spans:
        ends = (bisect.bisect_left(times, at[each]) for each in (span.first_event, span.last_event))
        first, last = ends
        peaks.setdefault(span.phase, []).append(max(totals[first : last + 1]))
    Path(result).write_text(json.dumps(_row(peaks, seconds)), "utf-8")


def _row(peaks: dict[str, list[int]], seconds: float) -> dict[str, Any]:
    """Put the peaks of the phases under the names of the table."""
    steps = [*peaks["first step"], *peaks.get("steady step", [])]
    return {
        "num_steps": len(steps),
        "load_peak_bytes": max(peaks["load"]),
        "first_step_peak_bytes": steps[0],
        "steady_step_peak_bytes": max(steps[1:], default=None),
        "evaluation_peak_bytes": max(peaks.get("evaluation", []), default=None),
        "checkpoint_peak_bytes": max(peaks.get("checkpoint", []), default=None),
        "step_peak_bytes": steps,
        "processor_seconds": round(seconds, 1),
    }


def _run(target: list[str]) -> None:
    """Run a script as Python would."""
    is_module = target[0] == "-m"
    name, *arguments = target[1:] if is_module else target
    with patch.object(sys, "argv", [name, *arguments]):
        try:
            if is_module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                sys.path[0] = str(Path(name).parent)
                runpy.run_path(name, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise


def _written_by() -> Iterator[tuple[str, str]]:
    """Yield the functions that write a checkpoint."""
    yield from _WRITERS
    if importlib.util.find_spec("safetensors") is not None:
        yield from _FLAT_WRITERS


def _noted(module: str, writer: str, counter: Any) -> Callable[..., Any]:
    """Return a function that writes as before, and tells that it does."""
    before = getattr(importlib.import_module(module), writer)

    def write(*args: Any, **kwargs: Any) -> Any:
        with counter.writing():
            return before(*args, **kwargs)

    return write


class _Marks:
    """Mark in a profile where phases begin and end."""

    def __init__(self) -> None:
        self._number = 0

    def position(self) -> int:
        self._number += 1
        with torch.autograd.profiler.record_function(f"{_MARK}{self._number}"):
            return self._number

    def host_peak_bytes(self) -> int:
        return 0

    def begin_step(self) -> None: ...

    def end_step(self) -> None: ...


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        run_inside(sys.argv[2], sys.argv[3:])
        sys.stdout.flush()
        os._exit(0)
    sys.exit(main(sys.argv[1:]))
