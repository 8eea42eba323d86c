"""Times single operators on a device beside their roofline times, as plans compute those.

Run: PYTHONPATH=src python benchmarks/record_operators.py --out operators.json   (about a minute)

Every operator of each case, and of whole steps of three models, is called again and again on the
same tensors between two events of the card's clock, so that what is timed is what a busy device
takes: the kernel, or the launch where that takes longer. Copies to and from the host are timed as a
whole, by themselves and beside computation. `--device cpu --scale 0.1` tries it here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from card_checks.card_lock import card_alone
from card_checks.jobs import card_jobs
from operator_cases import OperatorCase, operator_cases

from memfit.cost.operator_times import operation_seconds
from memfit.devices.catalogue import catalogued_device, current_device_name
from memfit.devices.spec import Device
from memfit.errors import UnknownDeviceError
from memfit.files import write_atomically
from memfit.job import Job
from memfit.runtime.run import open_plain_session, unguarded_run
from memfit.session.batches import find_layout, real_batch
from memfit.strategies.plan import Plan
from memfit.trace.events import Operation, Phase
from memfit.trace.modes import OperatorMode
from memfit.trace.operators import describe, tensors_in

_ENOUGH_SECONDS = 0.004
_MOST_REPEATS = 30
_LEAST_REPEATS = 3
_WRITE_EVERY_SECONDS = 3.0
_STEP_SHARE = 0.7
"""The share of the time by which single operators have to leave the rest to whole steps."""


def main(words: Sequence[str] | None = None) -> int:
    """Time as much as there is time for."""
    args = _parser().parse_args(words)
    deadline = time.monotonic() + args.seconds
    kind = "cpu" if args.device == "cpu" else "cuda"
    device = catalogued_device(_name_here() if args.device == "cuda" else args.device)
    recording = Recording(args.out, kind, device)
    with card_alone():
        deadline = max(deadline, time.monotonic() + args.seconds / 2)
        until = time.monotonic() + _STEP_SHARE * (deadline - time.monotonic())
        if kind == "cuda":
            recording.tried("transfers", lambda: recording.found.update(_transfers(args.scale)))
        for number, case in enumerate(operator_cases(kind, args.scale)):
            if time.monotonic() > until or number == args.most:
                break
            recording.tried(case.name, lambda case=case: recording.case(case))
        for name in ("gpt2", "cnn", "mlp", "vocabulary")[: args.most]:
            for autocast in (False, True) if kind == "cuda" else (False,):
                if time.monotonic() > deadline:
                    break
                title = f"step {name}{' bf16' if autocast else ''}"
                recording.tried(
                    title,
                    lambda t=title, n=name, a=autocast: recording.step(
                        t, card_jobs(args.size)[n](), autocast=a
                    ),
                )
    recording.end()
    print(f"{len(recording.found['rows'])} operators in {args.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("operators.json"))
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after so long")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--scale", type=float, default=1.0, help="make tensors smaller")
    parser.add_argument("--size", default="card", help="of the steps: card or tiny")
    parser.add_argument("--most", type=int, help="so many cases at most")
    return parser


def _name_here() -> str:
    try:
        return current_device_name()
    except UnknownDeviceError:
        return "h100-80gb"


class Recording:
    """Rows so far, kept in a file that is always whole."""

    def __init__(self, path: Path, kind: str, device: Device) -> None:
        self._path, self._kind, self._device = path, kind, device
        self._written = 0.0
        self._seen: dict[tuple[int, bool], dict[str, Any]] = {}
        self.found: dict[str, Any] = {
            "device": device.name,
            "card": torch.cuda.get_device_name() if kind == "cuda" else platform.processor(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "num_threads": torch.get_num_threads(),
            "num_cpus": os.cpu_count(),
            "date": time.strftime("%Y-%m-%d"),
            "finished": False,
            "failures": [],
            "steps": [],
            "rows": [],
        }

    def tried(self, name: str, work: Callable[[], object]) -> None:
        """Do some work; a failure is noted and ends nothing."""
        started = time.monotonic()
        try:
            work()
        except Exception as error:  # noqa: BLE001 - kernels refuse sizes and types; the rest goes on
            self.found["failures"].append({"case": name, "error": f"{error}"[:400]})
        if self._kind == "cuda":
            torch.cuda.empty_cache()
        self.found["case_seconds"] = self.found.get("case_seconds", {})
        self.found["case_seconds"][name] = round(time.monotonic() - started, 3)
        if time.monotonic() - self._written > _WRITE_EVERY_SECONDS:
            self._write()

    def case(self, case: OperatorCase) -> None:
        """Time the operators of a case."""
        _multiply(tf32=case.tf32)
        work = case.build()
        work()  # what only the first call does is left out
        with _Repeating(self, case.name, tf32=case.tf32):
            work()

    def step(self, title: str, job: Job, *, autocast: bool = False) -> None:
        """Time a step of a job as a whole, then its operators."""
        _multiply(tf32=False)
        layout = find_layout(job)
        session = open_plain_session(job, self._kind, layout)
        to = self._kind
        batch = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda each: each.to(to), real_batch(job, job.batch_size)
        )
        run = unguarded_run(session, Plan())
        with torch.autocast(self._kind, dtype=torch.bfloat16, enabled=autocast):
            run.step(batch)
            seconds = [self.clock(lambda: run.step(batch)) for _ in range(4)]
            with _Repeating(self, title, tf32=False) as repeating:
                run.step(batch)
        run.close()
        self.found["steps"].append(
            {
                "step": title,
                "seconds": min(seconds),
                "operators_seconds": repeating.seconds,
                "roofline_seconds": repeating.roofline_seconds,
                "bare_seconds": repeating.bare_seconds,
                "num_operations": repeating.num_operations,
            }
        )

    def clock(self, work: Callable[[], object]) -> float:
        """Time some work from an idle device to an idle one."""
        self._wait()
        started = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - started

    def repeated(self, call: Callable[[], object]) -> tuple[float, int]:
        """Call an operator again and again; give the seconds of a call, and how many there were."""
        once = self.clock(call)
        times = max(_LEAST_REPEATS, min(_MOST_REPEATS, int(_ENOUGH_SECONDS / max(once, 1e-6))))
        if self._kind != "cuda":
            return min(self.clock(call) for _ in range(times)), times
        rounds = []
        for _ in range(2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(times):
                call()
            end.record()
            end.synchronize()
            rounds.append(begin.elapsed_time(end) / 1e3 / times)
        return min(rounds), times

    def seen(self, signature: int, tf32: bool) -> dict[str, Any] | None:
        """Return the row of a call that was timed already."""
        return self._seen.get((signature, tf32))

    def add(self, row: dict[str, Any], signature: int, tf32: bool) -> None:
        """Keep a row."""
        self._seen[signature, tf32] = row
        self.found["rows"].append(row)

    def roofline(self, operation: Operation) -> float:
        """Return what plans say that an operator takes."""
        return operation_seconds(operation, self._device)

    def bare(self, operation: Operation) -> float:
        """Return the roofline time by the device's rates alone, and a launch."""
        device = self._device
        arithmetic = operation.num_flops / device.matrix_flops_per_second(operation.dtype)
        traffic = operation.moved_bytes / device.value("memory_bandwidth_bytes_per_second")
        return max(arithmetic, traffic) + device.value("launch_seconds")

    def end(self) -> None:
        """Say that all is done."""
        self.found["finished"] = True
        self._write()

    def _wait(self) -> None:
        if self._kind == "cuda":
            torch.cuda.synchronize()

    def _write(self) -> None:
        self._written = time.monotonic()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, json.dumps(self.found) + "\n")


class _Repeating(OperatorMode):
    """Time every operator by calling it many times; one that was timed before is only run."""

    def __init__(self, recording: Recording, case: str, *, tf32: bool) -> None:
        super().__init__()
        self._recording, self._case, self._tf32 = recording, case, tf32
        self.seconds = self.roofline_seconds = self.bare_seconds = 0.0
        self.num_operations = 0
        self.problems: Counter[str] = Counter()

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        out = func(*args, **kwargs)
        operation = describe(func, args, kwargs, out, Phase.FORWARD)
        if operation is None:
            return out
        row = self._recording.seen(operation.signature, self._tf32)
        if row is None:
            row = self._row(func, args, kwargs, operation)
            self._recording.add(row, operation.signature, self._tf32)
        row["num_calls"] += 1
        self.num_operations += 1
        self.roofline_seconds += row["roofline_seconds"]
        self.bare_seconds += row["bare_seconds"]
        self.seconds += row["seconds"]
        return out

    def _row(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], operation: Any
    ) -> dict[str, Any]:
        seconds, times = self._recording.repeated(lambda: func(*args, **kwargs))
        tensors = list(tensors_in(args))
        return {
            "case": self._case,
            "operator": operation.name,
            "overload": str(func),
            "dtype": operation.dtype,
            "tf32": self._tf32,
            "shapes": [list(each.shape) for each in tensors[:6]],
            "dtypes": [str(each.dtype).removeprefix("torch.") for each in tensors[:6]],
            "is_contiguous": [each.is_contiguous() for each in tensors[:6]],
            "places": sorted({each.device.type for each in tensors}),
            "num_tensors": len(tensors),
            "num_flops": operation.num_flops,
            "moved_bytes": operation.moved_bytes,
            "roofline_seconds": self._recording.roofline(operation),
            "bare_seconds": self._recording.bare(operation),
            "seconds": seconds,
            "num_repeats": times,
            "num_calls": 0,
        }


def _multiply(*, tf32: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


def _transfers(scale: float) -> dict[str, Any]:
    """Time copies to and from the host, by themselves and beside a product."""
    rows = []
    for num_bytes in (int(size * scale) for size in (1 << 16, 1 << 20, 1 << 24, 1 << 28)):
        for pinned in (True, False):
            host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
            card = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
            for name, target, source in (("to card", card, host), ("to host", host, card)):
                seconds = _transfer_seconds(target, source)
                rows.append(
                    {"copy": name, "num_bytes": num_bytes, "pinned": pinned, "seconds": seconds}
                )
    return {"transfers": rows, "overlap": _overlap(int(8192 * min(1.0, scale**0.5)))}


def _transfer_seconds(target: torch.Tensor, source: torch.Tensor) -> float:
    target.copy_(source, non_blocking=True)
    times = 5
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / times


def _overlap(width: int) -> dict[str, Any]:
    """Time a product and copies from the host, each alone and both at once."""
    left = torch.randn(width, width, device="cuda", dtype=torch.bfloat16)
    wide = torch.randn(1 << 26, device="cuda")
    host = torch.empty(1 << 27, dtype=torch.uint8, pin_memory=True)
    card = torch.empty_like(host, device="cuda")
    stream = torch.cuda.Stream()

    def multiply() -> None:
        for _ in range(4):
            left @ left

    def add() -> None:
        for _ in range(30):
            wide.add_(1.0)

    def copy(*, out: bool) -> None:
        with torch.cuda.stream(stream):
            target, source = (host, card) if out else (card, host)
            target.copy_(source, non_blocking=True)

    found: dict[str, Any] = {"num_bytes": host.numel(), "width": width}
    works: dict[str, tuple[Callable[[], None], ...]]
    works = {"product": (multiply,), "additions": (add,)}
    for out, way in ((True, "to host"), (False, "to card")):
        moved = partial(copy, out=out)
        works |= {way: (moved,), f"product and {way}": (moved, multiply)}
        works[f"additions and {way}"] = (moved, add)
    return found | {name: min(_times_of(parts)) for name, parts in works.items()}


def _times_of(parts: Sequence[Callable[[], None]]) -> Iterator[float]:
    """Time work that is started at once, a few times."""
    for _ in range(4):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for part in parts:
            part()
        torch.cuda.synchronize()
        yield time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
