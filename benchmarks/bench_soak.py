"""What very long runs take: memory, journal and report of 100,000 steps, watched and guarded.

Run: python benchmarks/bench_soak.py        (about twenty minutes on two cores)

A plain script of tiny steps runs by itself and under ``memfit run``, side by side; then a guarded
run of as many steps, in which a batch is too large now and then. Each notes its resident memory and
Python's blocks every thousand steps, all objects ten times; what the plain script grows by itself
is not memfit's. Growth is the median of the last tenth of the samples less that of step 5,000: to
look at all objects takes memory itself, for a while. The exit code is 1 where something is beyond
its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from results_file import write_result

from memfit.units import MIB, format_bytes

NUM_STEPS, EVERY, FROM_STEP = 100_000, 1000, 5000
MOST_GROWTH_BYTES = 5 * MIB
MOST_JOURNAL_BYTES = 2_000_000
MOST_REPORT_BYTES, MOST_REPORT_SECONDS = 2_000_000, 5.0
_FOLDER = Path(__file__).parent
_POLL_SECONDS = 1.0
_MOST_SIZES = 25
"""So many sizes of a journal are kept of a run."""
Samples = list[dict[str, Any]]


def main() -> int:
    """Run the trainings; print and store what they took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--json", action="store_true", help="print the figures; store nothing")
    args = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as name:
            figures = soaked(Path(name), args.steps)
    except KeyboardInterrupt:
        print("\ninterrupted; nothing was stored", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(figures, indent=1))
    else:
        write_result("soak", figures)
        for name, run in figures["runs"].items():
            shown = {key: value for key, value in run.items() if not isinstance(value, list)}
            print(name, json.dumps(shown, indent=1))
    found = beyond(figures)
    for sentence in found:
        print(sentence, file=sys.stderr)
    return int(bool(found))


def soaked(folder: Path, num_steps: int) -> dict[str, Any]:
    """Run all trainings in a folder and return their figures."""
    every, from_step = min(EVERY, num_steps // 20), min(FROM_STEP, num_steps // 4)
    watched, guarded = folder / "watched", folder / "guarded"
    plain = [sys.executable, "-m", "soak.training"]
    counts = [str(num_steps), str(every)]
    memfit_run = [sys.executable, "-m", "memfit", "run", "--quiet", "--folder", str(watched), "--"]
    samples, sizes = side_by_side(
        {
            "bare": [*plain, str(folder / "bare.jsonl"), *counts],
            "watched": [*memfit_run, *plain, str(folder / "watched.jsonl"), *counts],
        },
        folder,
    )
    words = ["-m", "soak.guarded", str(folder / "guarded.jsonl"), *counts, str(guarded)]
    more_samples, more_sizes = side_by_side({"guarded": [sys.executable, *words]}, folder)
    samples, sizes = {**samples, **more_samples}, {**sizes, **more_sizes}
    runs = {name: memory_of(found, from_step) for name, found in samples.items()}
    for name in ("watched", "guarded"):
        runs[name] |= {"journal_sizes": _thinned(sizes[name]), **_report_of(folder / name)}
        runs[name]["most_journal_bytes"] = max(size for _, size in sizes[name])
    runs["watched"]["ratio"] = round(
        runs["watched"]["processor_step_seconds"] / runs["bare"]["processor_step_seconds"], 3
    )
    runs["guarded"] |= _guarded_figures(samples["guarded"], from_step)
    return {"num_steps": num_steps, "sampled_every": every, "from_step": from_step, "runs": runs}


def side_by_side(
    commands: Mapping[str, Sequence[str]], folder: Path
) -> tuple[dict[str, Samples], dict[str, list[tuple[int, int]]]]:
    """Run commands at the same time to their ends.

    Args:
        commands: by name; each writes its samples to ``NAME.jsonl`` in the folder, and its journal,
            if it has one, to ``NAME``.
        folder: to run in.

    Returns:
        Samples by name, and the sizes of its journal with the step that it had come to.

    Raises:
        RuntimeError: if one fails.
    """
    paths = [str(_FOLDER), str(_FOLDER.parent / "src")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    sizes: dict[str, list[tuple[int, int]]] = {name: [] for name in commands}
    with _started(commands, environment) as processes:
        while any(process.poll() is None for process in processes.values()):
            time.sleep(_POLL_SECONDS)
            for name in commands:
                sizes[name].append((_step_of(folder / f"{name}.jsonl"), _size_of(folder / name)))
            _show({name: found[-1][0] for name, found in sizes.items()})
    for name, process in processes.items():
        if process.returncode:
            msg = f"{name} ended with {process.returncode}"
            raise RuntimeError(msg)
    return {name: _samples(folder / f"{name}.jsonl") for name in commands}, sizes


def memory_of(samples: Samples, from_step: int) -> dict[str, Any]:
    """Return what a run's memory did from a step on, and its processor time per step."""
    later = [each for each in samples if each["step"] >= from_step]
    objects = [each["objects_bytes"] for each in later if each["objects_bytes"] is not None]
    blocks = [each["python_blocks"] for each in later]
    resident = [each["resident_bytes"] for each in later]
    seconds = later[-1]["processor_seconds"] - later[0]["processor_seconds"]
    return {
        "num_samples": len(samples),
        "resident_bytes": resident[0],
        "resident_growth_bytes": growth_of(resident),
        "resident_highest_bytes": max(resident),
        "num_python_blocks": blocks[0],
        "python_blocks_growth": max(blocks) - blocks[0],
        "objects_bytes": objects[0],
        "objects_growth_bytes": max(objects) - objects[0],
        "processor_step_seconds": round(seconds / (later[-1]["step"] - later[0]["step"]), 7),
        "resident_samples": [(each["step"], each["resident_bytes"]) for each in samples],
    }


def growth_of(sizes: Sequence[int]) -> int:
    """Return how far the last tenth of some sizes is above the first of them."""
    last = sizes[-max(1, len(sizes) // 10) :]
    return round(statistics.median(last)) - sizes[0]


def beyond(figures: Mapping[str, Any]) -> list[str]:
    """Say what is beyond its limit; nothing where all is well."""
    found = []
    for name, run in figures["runs"].items():
        for what in ("resident", "objects"):
            growth_bytes = run[f"{what}_growth_bytes"]
            if growth_bytes > MOST_GROWTH_BYTES:
                found.append(f"{name}: {what} memory grew by {format_bytes(growth_bytes)}")
        if run.get("most_journal_bytes", 0) > MOST_JOURNAL_BYTES:
            found.append(f"{name}: the journal took {run['most_journal_bytes']:,} bytes")
        if run.get("report_bytes", 0) > MOST_REPORT_BYTES:
            found.append(f"{name}: the report takes {run['report_bytes']:,} bytes")
        if run.get("report_processor_seconds", 0.0) > MOST_REPORT_SECONDS:
            found.append(f"{name}: the report took {run['report_processor_seconds']:.1f} s")
    return found


@contextmanager
def _started(
    commands: Mapping[str, Sequence[str]], environment: Mapping[str, str]
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start commands, and end what is still running where this is interrupted."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, words in commands.items():
            processes[name] = subprocess.Popen(words, env=environment)
        yield processes
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in processes.values():
            process.wait()
        if sys.stderr.isatty():
            print(file=sys.stderr)


def _show(steps: Mapping[str, int]) -> None:
    """Show how far the runs are, in one line of a terminal."""
    if sys.stderr.isatty():
        line = ", ".join(f"{name}: step {step:,}" for name, step in steps.items())
        print(f"\r{line}", end="", file=sys.stderr, flush=True)


def _samples(path: Path) -> Samples:
    lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _step_of(path: Path) -> int:
    found = _samples(path)
    return found[-1]["step"] if found else 0


def _size_of(folder: Path) -> int:
    if not folder.exists():
        return 0
    return sum(path.stat().st_size for path in folder.glob("*.json*"))


def _thinned(sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    by_step = dict(sizes)  # the last size at each step
    return [*by_step.items()][:: max(1, len(by_step) // _MOST_SIZES)]


def _report_of(folder: Path) -> dict[str, Any]:
    """Write the report of a run, and say how large it is and what it took."""
    before = os.times()
    words = [sys.executable, "-m", "memfit", "report", str(folder)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    seconds = sum(after[2:4]) - sum(before[2:4])
    lines = (folder / "steps.jsonl").read_bytes().count(b"\n")
    return {
        "num_lines": lines,
        "journal_bytes": _size_of(folder),
        "report_bytes": (folder / "report.html").stat().st_size,
        "report_processor_seconds": round(seconds, 2),
    }


def _guarded_figures(samples: Samples, from_step: int) -> dict[str, Any]:
    first = next(each for each in samples if each["step"] >= from_step)
    last = samples[-1]
    seconds = last["guarded_seconds"] - first["guarded_seconds"]
    step_seconds = seconds / (last["step"] - first["step"])
    return {
        "processor_step_seconds": round(step_seconds, 7),
        "ratio": round(step_seconds / last["bare_step_seconds"], 3),
        "num_out_of_memory": last["num_out_of_memory"],
    }


if __name__ == "__main__":
    sys.exit(main())
