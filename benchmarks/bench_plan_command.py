"""How long ``memfit plan`` takes as a whole command, from the shell to the saved plan.

Run: python benchmarks/bench_plan_command.py [--beside ../other-checkout] [--jobs NAME ...]

Five ordinary trainings are planned for a card of 12 GiB, each once, then with another budget, and
then as at first, with what the calls before have kept; a decoder of 8 billion parameters is planned
for the memory of an H200 and for 66 GiB, each with nothing kept, and as at first. Every command is
a process of its own; the first plan that fits is the first one that it tells of, a known one among
them. Modules are compiled before, as they are after any first command. A loop of plain Python is
timed before each, as the processor of a shared machine is not always equally fast.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from installed import compile_installed, user_environment
from results_file import commit_of, save_result

NAME = "plan_command"
_HERE = Path(__file__).resolve().parent
_CARD = ("--device", "rtx-3060-12gb")
_BETTER = re.compile(r"after (?:(\d+) min )?([\d.]+) s a plan that fits")
_KNOWN = "memfit: an earlier call has found a plan that fits"
_LOOP_TIMES = 5_000_000
_COMMANDS: dict[str, tuple[str, tuple[tuple[str, ...], ...]]] = {
    "nanogpt": ("plan_command/nanogpt.py", (_CARD, (*_CARD, "--budget", "6GiB"))),
    "bert": ("plan_command/bert.py", (_CARD, (*_CARD, "--budget", "8GiB"))),
    "resnet50": ("plan_command/resnet50.py", (_CARD, (*_CARD, "--budget", "8GiB"))),
    "lora": ("plan_command/lora.py", (_CARD, (*_CARD, "--budget", "8GiB"))),
    "unet": ("plan_command/unet.py", (_CARD, (*_CARD, "--budget", "8GiB"))),
    "8b": ("large_llama.py", (("--device", "h200"), ("--device", "h200", "--budget", "66GiB"))),
}
_EACH_ALONE = frozenset({"8b"})
"""Whose questions are each asked with nothing kept."""


def main() -> None:
    """Plan everything under one or two checkouts, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--beside", type=Path, help="another checkout, asked each question in turn")
    parser.add_argument("--jobs", nargs="*", choices=_COMMANDS, default=list(_COMMANDS))
    parser.add_argument("--seconds", type=float, default=900, help="after which one is given up")
    arguments = parser.parse_args()
    for checkout in filter(None, (_HERE.parent, arguments.beside)):
        compile_installed(checkout)
    rows = []
    for name in arguments.jobs:
        with tempfile.TemporaryDirectory() as folder:
            for row in _asked(name, Path(folder), arguments):
                rows.append(row)
                print(row, flush=True)
    if set(arguments.jobs) == set(_COMMANDS):
        beside = {"other": commit_of(arguments.beside)} if arguments.beside else {}
        save_result(NAME, {"rows": rows, **beside})


def _asked(name: str, folder: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Ask all questions about a job, and the first one again."""
    file, questions = _COMMANDS[name]
    begun = set()
    for words in (*questions, questions[0]):
        cache = folder / "_".join(words[-2:]) if name in _EACH_ALONE else folder
        row: dict[str, Any] = {"job": name, "asked": " ".join(words), "is_kept": cache in begun}
        begun.add(cache)
        row |= _timed(file, words, _HERE.parent, arguments.seconds, cache)
        if arguments.beside:
            other = _timed(file, words, arguments.beside, arguments.seconds, cache / "other")
            row |= {f"other_{key}": value for key, value in other.items()}
        yield row


def _timed(
    file: str, words: tuple[str, ...], checkout: Path, most: float, cache: Path
) -> dict[str, Any]:
    """Plan once; return the seconds, those until the first plan that fits, and what it chose."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "plan.yaml")
        command = [sys.executable, "-m", "memfit", "plan", f"{_HERE / file}:job", *words]
        command += ["--save", str(plan)]
        changes = {"PYTHONPATH": str(checkout.resolve() / "src"), "MEMFIT_CACHE_DIR": str(cache)}
        environment = user_environment(changes)
        environment.setdefault("OMP_NUM_THREADS", "1")
        loop_seconds = _loop_seconds()
        begun = time.perf_counter()
        told: list[tuple[float, float]] = []  # when, by the shell's and by the planner's clock
        known: list[float] = []
        with subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as running:
            assert running.stderr is not None, "it is a pipe"
            limit = threading.Timer(most, running.kill)
            limit.start()
            for line in running.stderr:
                after = time.perf_counter() - begun
                if line.startswith(_KNOWN):
                    known.append(after)
                elif found := _BETTER.search(line):
                    told.append((after, _seconds(*found.groups())))
            _, status, used = os.wait4(running.pid, 0)
            running.returncode = os.waitstatus_to_exitcode(status)
            limit.cancel()
        seconds = time.perf_counter() - begun
        return {
            "exit_code": running.returncode,
            "seconds": seconds,
            "loop_seconds": loop_seconds,
            **({"known_plan_seconds": known[0]} if known else {}),
            **_parts(told, seconds),
            "cpu_seconds": used.ru_utime + used.ru_stime,
            "peak_bytes": used.ru_maxrss * 1024,
            **_chosen(plan),
        }


def _loop_seconds() -> float:
    """Time a loop of plain Python, by the processor's clock."""
    begun = time.process_time()
    for _ in range(_LOOP_TIMES):
        pass
    return time.process_time() - begun


def _seconds(minutes: str | None, seconds: str) -> float:
    return 60 * int(minutes or 0) + float(seconds)


def _parts(told: list[tuple[float, float]], seconds: float) -> dict[str, float]:
    """Take the time apart by what was told: when, by the shell's and by the planner's clock."""
    if not told:
        return {}
    (first, planned), (last, _) = told[0], told[-1]
    return {
        "first_plan_seconds": first,
        "before_planning_seconds": first - planned,
        "last_plan_seconds": last,
        "after_last_plan_seconds": seconds - last,
    }


def _chosen(plan: Path) -> dict[str, Any]:
    """Read what was chosen."""
    if not plan.is_file():
        return {}
    found = _READ.format(path=json.dumps(str(plan)))
    shown = subprocess.run(
        [sys.executable, "-c", found], capture_output=True, text=True, check=True
    )
    return json.loads(shown.stdout)


_READ = """
import json
from memfit.strategies.plan import Plan
plan = Plan.load({path})
found = plan.prediction
print(json.dumps({{
    "strategies": plan.labels(),
    "process_bytes": found.process_bytes,
    "step_seconds": found.step_seconds,
}}))
"""


if __name__ == "__main__":
    main()
