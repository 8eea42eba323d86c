"""Estimated seconds of operators and steps beside measured ones, by class of operator.

Run: python benchmarks/bench_operator_times.py                     (about four minutes on one core)

On the processor the operators of the planner's jobs and of a list of cases are timed, and a step of
each job as a whole. Those of a card are read from `recorded_operators`, that record_operators.py
and check_card.py wrote there; steps that record_gpu.py recorded are estimated as well. `bare` is
the plain roofline by the rates of the device as they are, `estimate` what plans go by: what each
class reaches, and on the processor its cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import record_operators
from accuracy.rebuild import rebuild
from accuracy.rows import parse_row
from accuracy.scoring import card_of_row, torch_version_of
from card_checks.jobs import card_jobs
from operator_cases import operator_cases
from planner_jobs import planner_jobs
from recording.rowfile import card_slug
from results_file import save_result

import memfit
from memfit.cost.operator_classes import class_of
from memfit.cost.operator_times import operation_seconds
from memfit.devices.catalogue import catalogued_device
from memfit.devices.spec import Device
from memfit.prediction.brief_recording import record_briefly
from memfit.prediction.recording import record_steps
from memfit.strategies.plan import Plan
from memfit.trace.events import Operation, Phase

_NAME = "operator_times"
_RECORDED = Path(__file__).parent / "recorded_operators"
_ROWS = Path(__file__).parent / "accuracy" / "rows"
_SCALE = 0.1
_TENTHS = 10
_ABOUT = ("card", "torch", "cuda", "num_threads", "date")


def main(words: Sequence[str] | None = None) -> int:
    """Compare estimates with what was measured, here and on cards before."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="the one of the planner's jobs that is run; nothing is kept")
    args = parser.parse_args(words)
    here = _found(_recorded_here(args.only))
    if args.only:
        print(json.dumps(here, indent=1))
        return 0
    devices = {"cpu": here}
    for path in sorted(_RECORDED.glob("*.json")):
        recorded = json.loads(path.read_text("utf-8"))
        found = _found({**recorded, "steps": _cases(recorded)})
        devices[recorded["device"]] = found | _of_rows(recorded["card"])
    save_result(_NAME, {"devices": devices})
    return 0


def _found(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Summarise the recording of one device."""
    return {
        **{name: recorded[name] for name in _ABOUT},
        "num_operators": len(recorded["rows"]),
        "classes": by_class(recorded["rows"], catalogued_device(recorded["device"])),
        "steps": [_step(each) for each in recorded["steps"]],
    }


def _cases(recorded: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Predict the steps that were timed on a card, under their plans."""
    device, found = catalogued_device(recorded["device"]), []
    for case in recorded["cases"]:
        job, plan = card_jobs("card")[case["job"]](), Plan.from_json(case["plan"])
        trace = record_briefly(job, plan, device=device).steady
        bare = sum(bare_seconds(each, device) for each in trace.operations)
        predicted = memfit.predict(job, device.name, plan).step_seconds
        found.append(
            {
                "step": case["name"],
                "seconds": case["seconds"],
                "num_operations": len(trace.operations),
                "bare_seconds": bare,
                "estimated_seconds": predicted,
            }
        )
    return found


def _of_rows(card: str) -> dict[str, Any]:
    """Estimate the steps that record_gpu.py recorded on a card, of any kind of model."""
    path = _ROWS / f"recorded_{card_slug(card)}.jsonl"
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    found = [ratios for row in rows if (ratios := ratios_of_row(row)) is not None]
    bare, estimate = zip(*found, strict=True)
    spreads = {"bare": _spread(bare), "estimate": _spread(estimate)}
    return {"recorded_steps": {"num_steps": len(found), **spreads}}


def ratios_of_row(row: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the bare and the estimated seconds over those of a recorded row, if it has any."""
    seconds = row["measured_extra"].get("step_seconds")
    if seconds is None:
        return None
    parsed = parse_row(row)
    device, rebuilt = card_of_row(parsed), rebuild(parsed)
    version = torch_version_of(parsed)
    recording = record_steps(
        rebuilt.setup, device, num_steps=rebuilt.num_steps, torch_version=version
    )
    operations = recording.steady.operations
    bare = sum(bare_seconds(each, device) for each in operations)
    return bare / seconds, sum(operation_seconds(each, device) for each in operations) / seconds


def _recorded_here(only: str | None) -> dict[str, Any]:
    """Time the planner's jobs and the list of cases on the processor."""
    with tempfile.TemporaryDirectory() as folder:
        device = catalogued_device("cpu")
        recording = record_operators.Recording(Path(folder) / "operators.json", "cpu", device)
        for name, build in planner_jobs().items():
            if only is None or name == only:
                recording.step(name, build())
                predicted = memfit.predict(build(), "cpu").step_seconds
                recording.found["steps"][-1]["estimated_seconds"] = predicted
        for case in operator_cases("cpu", _SCALE) if only is None else ():
            recording.tried(case.name, lambda case=case: recording.case(case))
        return recording.found


def by_class(rows: Iterable[Mapping[str, Any]], device: Device) -> dict[str, Any]:
    """Summarise how far estimates are from what was measured, for each class."""
    groups: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for row in rows:
        operation = _operation(row)
        estimate, bare = operation_seconds(operation, device), bare_seconds(operation, device)
        total = row["seconds"] * row["num_calls"]
        ratios = bare / row["seconds"], estimate / row["seconds"]
        groups[class_of(row["operator"]).value].append((*ratios, total))
    return {
        name: {
            "num_operators": len(found),
            "seconds": sum(each[2] for each in found),
            "bare": _spread([each[0] for each in found]),
            "estimate": _spread([each[1] for each in found]),
        }
        for name, found in sorted(groups.items())
    }


def bare_seconds(operation: Operation, device: Device) -> float:
    """Return the roofline time by the device's rates alone, and a launch."""
    arithmetic = operation.num_flops / device.matrix_flops_per_second(operation.dtype)
    traffic = operation.moved_bytes / device.value("memory_bandwidth_bytes_per_second")
    return max(arithmetic, traffic) + device.value("launch_seconds")


def _operation(row: Mapping[str, Any]) -> Operation:
    dtype = "tf32" if row["tf32"] and row["dtype"] == "float32" else row["dtype"]
    work = row["num_flops"], row["moved_bytes"]
    return Operation(row["operator"], Phase.FORWARD, dtype, *work)


def _spread(ratios: Sequence[float]) -> dict[str, float]:
    """Give the median, and the range of the middle eight tenths."""
    ordered = sorted(ratios)
    tenths = statistics.quantiles(ordered, n=_TENTHS) if len(ordered) > 1 else ordered * 2
    return {
        "least": round(ordered[0], 3),
        "most": round(ordered[-1], 3),
        "p10": round(tenths[0], 3),
        "median": round(statistics.median(ordered), 3),
        "p90": round(tenths[-1], 3),
    }


def _step(step: Mapping[str, Any]) -> dict[str, Any]:
    """Compare a step as a whole."""
    seconds = step["seconds"]
    found = {
        "step": step["step"],
        "seconds": seconds,
        "num_operations": step["num_operations"],
        "bare_of_measured": round(step["bare_seconds"] / seconds, 3),
    }
    return {**found, "estimate_of_measured": round(step["estimated_seconds"] / seconds, 3)}


if __name__ == "__main__":
    sys.exit(main())
