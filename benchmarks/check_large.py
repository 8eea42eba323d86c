"""A decoder of 8 billion parameters under its plans, on a card: bytes, seconds and losses.

Run here:    python benchmarks/check_large.py --plan large_plans.json       (five minutes, no GPU)
On the card: PYTHONPATH=src python benchmarks/check_large.py large_plans.json --out large_card.json

The job of `large_llama.py`, planned for an H200 at several budgets without one. Each plan is then
carried out in a process of its own, which begins with the plan's allocator settings: the model is
built on the card from one seed, and each process runs the same steps of the same batch. Without a
plan the step does not fit the card, so losses are compared between plans.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import large_llama
import torch
from recording.cards import CudaCard
from torch.utils._pytree import tree_map_only

import memfit
from memfit import Plan
from memfit.files import write_atomically
from memfit.runtime.run import open_plain_session, unguarded_run
from memfit.session.batches import find_layout

_DEVICE = "h200"
_BUDGETS = (None, "110GiB", "80GiB", "66GiB")
_NUM_STEPS = 4
_SEED = 11
_KEPT = (
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "process_bytes",
    "first_step_peak_bytes",
    "step_seconds",
    "host_bytes",
)


def main() -> int:
    """Plan, or carry out."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("plans", type=Path)
    parser.add_argument("--plan", action="store_true", help="find the plans and write them")
    parser.add_argument("--out", type=Path, default=Path("large_card.json"))
    parser.add_argument("--seconds", type=float, default=240, help="for all of it, on the card")
    parser.add_argument("--case", type=int, help="carry out one plan in this process")
    args = parser.parse_args()
    if args.plan:
        _write(args.plans, {"device": _DEVICE, "cases": [_planned(each) for each in _BUDGETS]})
        return 0
    cases = json.loads(args.plans.read_text(encoding="utf-8"))["cases"]
    if args.case is not None:
        _write(args.out, _carried_out(Plan.from_json(cases[args.case]["plan"])))
        return 0
    return _all_carried_out(cases, args)


def _planned(budget: str | None) -> dict[str, Any]:
    """Find the plan for a budget as the command does, and keep what was predicted of it."""
    started = time.perf_counter()
    plan = memfit.plan(large_llama.job, _DEVICE, budget, prove=False)
    seconds = time.perf_counter() - started
    figures = plan.prediction.to_json()
    print(budget, f"{seconds:.0f} s", *plan.labels(), flush=True)
    return {
        "budget": budget,
        "planning_seconds": round(seconds, 1),
        "plan": Plan(strategies=plan.strategies, device=plan.device).to_json(),
        "strategies": list(plan.labels()),
        "predicted": {name: figures[name] for name in _KEPT if name in figures},
    }


def _all_carried_out(cases: list[dict[str, Any]], args: argparse.Namespace) -> int:
    """Carry the plans out one after the other, the smallest first; results are kept as they come.

    Whatever takes longer than there is time for is said to have.
    """
    until = time.monotonic() + args.seconds
    found: dict[str, Any] = {
        "benchmark": "large_card",
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "num_threads": torch.get_num_threads(),
        "device": _DEVICE,
        "card": torch.cuda.get_device_name(),
        "cases": [],
    }
    for number in reversed(range(len(cases))):
        part = args.out.with_suffix(f".{number}.json")
        command = [sys.executable, __file__, str(args.plans), "--case", str(number)]
        conf = next((s["conf"] for s in cases[number]["plan"]["strategies"] if "conf" in s), "")
        left = until - time.monotonic()
        try:
            if left < 1:
                raise subprocess.TimeoutExpired(command, left)
            ended = subprocess.run(
                [*command, "--out", str(part)],
                env={**os.environ, "PYTORCH_ALLOC_CONF": conf},
                timeout=left,
                check=False,
                capture_output=True,
                text=True,
            )
            measured = json.loads(part.read_text("utf-8")) if part.exists() else {}
            measured |= {} if measured else {"error": ended.stderr[-1500:]}
        except subprocess.TimeoutExpired:
            measured = {"error": "the time was over"}
        part.unlink(missing_ok=True)
        found["cases"].append({**cases[number], "measured": measured})
        _write(args.out, found)
        print(cases[number]["budget"], json.dumps(measured), flush=True)
    return 0


def _carried_out(plan: Plan) -> dict[str, Any]:
    """Run steps and read what they take."""
    card = CudaCard()
    card.start()
    layout = find_layout(large_llama.job)
    job = replace(large_llama.job, model=_build_on_card)
    torch.manual_seed(_SEED)
    batch = large_llama.make_batch(job.batch_size)
    session = open_plain_session(job, "cuda", layout, plan)
    batch = tree_map_only(torch.Tensor, lambda each: each.to("cuda"), batch)
    # Building in float32 took more than the step may.
    torch.cuda.empty_cache()
    card.reset_peaks()
    with closing(unguarded_run(session, plan)) as run:
        losses = [run.step(batch).loss.item()]
        card.wait()
        first_peak_bytes, _ = card.peaks()
        card.reset_peaks()
        seconds = []
        for _ in range(_NUM_STEPS - 1):
            started = time.perf_counter()
            loss = run.step(batch).loss
            card.wait()
            seconds.append(time.perf_counter() - started)
            losses.append(loss.item())
        allocated_bytes, reserved_bytes = card.peaks()
        return {
            "peak_allocated_bytes": allocated_bytes,
            "peak_reserved_bytes": reserved_bytes,
            "process_bytes": card.process().process_bytes,
            "first_step_peak_bytes": first_peak_bytes,
            "step_seconds": statistics.median(seconds),
            "losses": losses,
        }


def _build_on_card() -> torch.nn.Module:
    """Build the decoder on the card, where random draws take no time."""
    torch.manual_seed(_SEED)
    with torch.device("cuda"):
        return large_llama.build_model()


def _write(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
