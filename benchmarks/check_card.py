"""Checks on a real card what memfit says of it: bytes, seconds, equal results, the guard.

Run: PYTHONPATH=src python benchmarks/check_card.py --out card_checks.json     (about three minutes)

Six jobs run as they are, under each strategy alone, and under plans for 70 % and 45 % of what they
take. Each case has a process of its own, since what is reserved depends on what came before. Plans
are found beside each other on the processor; one case at a time has the card. Further checks: a
step that really runs out of memory under the guard, and the commands doctor, calibrate, measure and
train. The file of results is written anew after each case, so that a cut loses nothing.

`--plan-only --device h100-80gb` predicts everything without a card, to compare two builds of torch.
`--device cpu --size tiny` tries everything here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from fnmatch import fnmatchcase
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import torch
from card_checks.card_lock import LOCK, card_alone
from card_checks.cases import Case, all_cases
from card_checks.jobs import SIZES

from memfit.devices.catalogue import current_device_name
from memfit.errors import UnknownDeviceError
from memfit.files import write_atomically

BENCHMARKS = Path(__file__).parent
_JOBS = BENCHMARKS / "card_checks" / "jobs.py"
_PLANNING_SECONDS = 90
_CASE_SECONDS = 150
_TEXT = 4000
_FIRST_CASES = 18
_OVER = "the time was over"
_TRAIN = ("train", "conve", "--dataset", "nations", "--max-steps", "30", "--json")


def main(words: Sequence[str] | None = None) -> int:
    """Check everything there is time for; gives 0 unless no case could be tried."""
    args = _parser().parse_args(words)
    deadline = time.monotonic() + args.minutes * 60
    with tempfile.TemporaryDirectory(prefix="memfit-card-") as folder:
        os.environ.setdefault(LOCK, str(Path(folder) / "lock"))
        device, problem = _device(args.device)
        results = _Results(args.out, {**_about(device), "size": args.size, "problem": problem})
        work = _Work(Path(folder), args, device, deadline)
        cases = all_cases()[args.first :]
        names = [case for case in cases if args.only is None or _is_asked(case, args.only)]
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: work.end())
        first, later = ([], []) if args.plan_only else _checks(work, args)
        tasks = [lambda case=case: work.case(case) for case in names[: args.most]]
        with ThreadPoolExecutor(args.workers) as pool:
            for check in first:
                pool.submit(results.add, "checks", check)
            for place, task in enumerate(tasks):
                pool.submit(results.add, "cases", task)
                if place == min(_FIRST_CASES, len(tasks)) - 1:
                    for check in later:
                        pool.submit(results.add, "checks", check)
        results.end()
    print(f"{len(results.found['cases'])} cases in {args.out}")
    return 0 if results.found["cases"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("card_checks.json"))
    parser.add_argument("--minutes", type=float, default=3.0, help="stop before so long")
    parser.add_argument("--device", default="cuda", help="cuda, cpu, or with --plan-only a name")
    parser.add_argument("--size", choices=SIZES, default="card")
    parser.add_argument("--only", metavar="NAME", help="cases of this name; * stands for any")
    parser.add_argument("--first", type=int, default=0, help="leave out so many cases before it")
    parser.add_argument("--most", type=int, help="so many cases at most")
    parser.add_argument("--workers", type=int, default=12, help="processes beside each other")
    parser.add_argument(
        "--plan-only", action="store_true", help="predict, and leave the card alone"
    )
    parser.add_argument("--no-commands", action="store_true", help="leave memfit's commands out")
    return parser


def _is_asked(case: Case, pattern: str) -> bool:
    return fnmatchcase(case.name, pattern)


def _device(asked: str) -> tuple[str, str | None]:
    """Give the catalogue's name of the card that is here, or what was asked for."""
    if asked != "cuda":
        return asked, None
    try:
        return current_device_name(), None
    except UnknownDeviceError as error:
        return "h100-80gb", str(error)


def _about(device: str) -> dict[str, Any]:
    found = {
        "device": device,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "num_cpus": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
    }
    try:
        found["transformers"] = version("transformers")
        command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used"]
        command += ["--format=csv,noheader"]
        found["card"] = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=False
        ).stdout.strip()
    except Exception as error:  # noqa: BLE001 - a card's name is no reason to check nothing
        found["card"] = f"unknown: {error}"
    return found


class _Results:
    """What was found so far, in a file that is always whole."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self.found: dict[str, Any] = {**about, "finished": False, "cases": [], "checks": []}
        self._write()

    def add(self, place: str, work: Callable[[], dict[str, Any]]) -> None:
        """Do some work and keep what came of it."""
        try:
            found = work()
        except Exception as error:  # noqa: BLE001 - one failure is not to end the rest
            found = {"name": "unknown", "error": f"{type(error).__name__}: {error}"}
        if found.get("complaint") == _OVER:
            return
        with self._lock:
            found["at_seconds"] = round(time.monotonic() - self._started, 2)
            self.found[place].append(found)
            self._write()
            print(_told(found), flush=True)

    def end(self) -> None:
        """Say that all is done."""
        self.found["finished"] = True
        self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, json.dumps(self.found, indent=1, default=str) + "\n")


class _Work:
    """Runs tasks in processes of their own, until the time is over."""

    def __init__(
        self, folder: Path, args: argparse.Namespace, device: str, deadline: float
    ) -> None:
        self._folder, self._args, self.device = folder, args, device
        self._deadline = deadline
        self._numbers = count()
        self._running: set[int] = set()

    def end(self) -> None:
        """End all processes and this one; what was found is in the file."""
        for number in tuple(self._running):
            with suppress(ProcessLookupError):
                os.killpg(number, signal.SIGKILL)
        os._exit(1)

    def case(self, case: Case) -> dict[str, Any]:
        """Plan a case, then carry it out."""
        task = {**case.to_json(), "size": self._args.size, "device": self.device}
        found = {**task, **self.child({**task, "do": "plan"}, _PLANNING_SECONDS)}
        if self._args.plan_only or "plan" not in found:
            return found
        conf = _allocator_conf(found["plan"])
        environment = {} if conf is None else {"PYTORCH_ALLOC_CONF": conf}
        measured = {**task, "plan": found["plan"], "do": "carry out"}
        return {**found, "measured": self.child(measured, _CASE_SECONDS, environment)}

    def child(
        self, task: Mapping[str, Any], seconds: float, environment: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Do a task in a process of its own."""
        number = next(self._numbers)
        paths = self._folder / f"{number}.task.json", self._folder / f"{number}.result.json"
        paths[0].write_text(json.dumps(task, default=str), encoding="utf-8")
        command = [sys.executable, "-m", "card_checks.child", *map(str, paths)]
        ended = self.command(command, seconds, environment)
        try:
            return json.loads(paths[1].read_text("utf-8"))
        except (OSError, ValueError):
            return {"error": "no result", **ended}

    def command(
        self, command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Run a command, and end its whole group where the time is over."""
        left = min(seconds, self._deadline - time.monotonic())
        if left <= 0:
            return {"complaint": _OVER}
        started = time.monotonic()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=_environment(environment or {}),
            start_new_session=True,
        )
        self._running.add(process.pid)
        try:
            out, complaint = process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, complaint = process.communicate()
            complaint += f"\nstopped after {left:.0f} s"
        finally:
            self._running.discard(process.pid)
        return {
            "exit_code": process.returncode,
            "seconds": time.monotonic() - started,
            "out": out,
            "complaint": complaint[-_TEXT:],
        }


def _environment(changes: Mapping[str, str]) -> dict[str, str]:
    dropped = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")
    found = {name: value for name, value in os.environ.items() if name not in dropped}
    paths = [str(BENCHMARKS), str(BENCHMARKS.parent / "src"), found.get("PYTHONPATH", "")]
    found["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return found | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | dict(changes)


def _allocator_conf(plan: Mapping[str, Any]) -> str | None:
    """Find the allocator's settings in a plan; a process has to begin with them."""
    return next((each["conf"] for each in plan["strategies"] if "conf" in each), None)


Check = Callable[[], dict[str, Any]]


def _checks(work: _Work, args: argparse.Namespace) -> tuple[list[Check], list[Check]]:
    """List what is checked before the cases, and after the first of them."""
    is_card = work.device != "cpu"
    job = f"{_JOBS}:{args.size}_mlp"
    kind = "cuda" if is_card else "cpu"
    first: list[Check] = [lambda: _command(work, ["doctor", "--json"], alone=False)]
    if is_card:
        first.append(lambda: _command(work, ["calibrate", "--json"]))
        first += [lambda name=name: _guard(work, args, name) for name in ("mlp", "gpt2")]
    later: list[Check] = [
        lambda: _command(work, ["measure", job, "--device", kind, "--json"]),
        lambda: _command(work, [*_TRAIN, "--device", kind]),
    ]
    return ([], []) if args.no_commands else (first, later)


def _guard(work: _Work, args: argparse.Namespace, job: str) -> dict[str, Any]:
    """Have a job's step run out of memory under the guard."""
    task = {"do": "guard", "size": args.size, "job": job}
    return {"name": f"guard: {job}", **work.child(task, _CASE_SECONDS)}


def _command(work: _Work, words: Sequence[str], *, alone: bool = True) -> dict[str, Any]:
    """Run one of memfit's commands, by default while it has the card alone."""
    lock = card_alone() if alone else nullcontext()
    with tempfile.TemporaryDirectory(prefix="memfit-command-") as folder, lock:
        further = ["-o", str(Path(folder) / "run")] if words[0] == "train" else []
        command = [sys.executable, "-m", "memfit", *words, *further]
        ended = work.command(command, _PLANNING_SECONDS, {"MEMFIT_CONFIG_DIR": folder})
    try:
        ended["out"] = json.loads(ended["out"])
    except (KeyError, ValueError):
        ended["out"] = str(ended.get("out"))[-_TEXT:]
    return {"name": f"memfit {words[0]}", **ended}


def _told(found: Mapping[str, Any]) -> str:
    """Write an outcome in a line."""
    measured = found.get("measured", found)
    problem = found.get("error") or measured.get("error") or found.get("refused")
    if problem:
        return f"{found.get('name')}: {str(problem)[:160]}"
    predicted, same = found.get("predicted", {}), measured.get("same", {})
    words = [
        f"{name.removesuffix('_bytes')} {predicted[name]:,} predicted, {measured[name]:,}"
        for name in ("peak_allocated_bytes", "peak_reserved_bytes", "process_bytes")
        if measured.get(name) is not None and predicted.get(name) is not None
    ]
    seconds = measured.get("step_seconds")
    words += [f"{predicted.get('step_seconds'):.4f} s, {seconds:.4f} s"] if seconds else []
    apart = same.get("with_plan", {}).get("parameters_of_change")
    words += [] if apart is None else [f"parameters apart by {apart:.1e}"]
    return f"{found.get('name')}: {'; '.join(words) or found.get('exit_code', 'ok')}"


if __name__ == "__main__":
    sys.exit(main())
