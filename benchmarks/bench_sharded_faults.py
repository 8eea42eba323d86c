"""Sharded runs in which a random rank fails at random operators, held against undisturbed ones.

Run: python benchmarks/bench_sharded_faults.py [--faults 100]     (about 10 minutes on two cores)

Four ranks over gloo train four steps of a small model that FSDP2 has sharded, in fp64, with
clipping and batches that are not even. One rank raises an out-of-memory error at a random operator,
in forward, backward, clipping, update or in what the guard itself does. Weights and optimizer
states of all ranks are compared with those of the undisturbed run. A run that takes more than 90 s
counts as one that hangs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from results_file import save_result
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, spawn

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.runtime import sharded_faults

_NUM_RANKS = 4


def main() -> None:
    """Run all faults, in new processes after each that was not got over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=100)
    num_faults = parser.parse_args().faults
    rows: list[dict[str, Any]] = []
    lost: list[dict[str, Any]] = []
    number = 0
    while number < num_faults:
        found, message = _until_one_is_lost([*range(number, num_faults)])
        rows += found
        number += len(found) // _NUM_RANKS
        if message:
            lost.append({"number": number, "message": message})
            print(lost[-1], flush=True)
            number += 1
    save_result("sharded_faults", _result(rows, lost, num_faults))


def _until_one_is_lost(numbers: list[int]) -> tuple[list[dict[str, Any]], str]:
    """Run faults until one ends or stops the ranks; return complete rows, and what was said."""
    with tempfile.TemporaryDirectory() as folder:
        message = ""
        arguments = (_NUM_RANKS, str(Path(folder, "store")), folder, numbers)
        try:
            spawn(sharded_faults.fails_and_goes_on, args=arguments, nprocs=_NUM_RANKS)
        except (ProcessExitedException, ProcessRaisedException) as error:
            message = str(error).strip().rpartition("\n")[2]
        said = [path.read_text().splitlines() for path in Path(folder).glob("rank-*.jsonl")]
    num_complete = min((len(lines) for lines in said), default=0)
    return [json.loads(line) for lines in said for line in lines[:num_complete]], message


def _result(
    rows: list[dict[str, Any]], lost: list[dict[str, Any]], num_faults: int
) -> dict[str, Any]:
    of_failed = [row for row in rows if row["phases"]]
    firsts = {row["number"]: row for row in of_failed}
    return {
        "num_ranks": _NUM_RANKS,
        "num_faults": num_faults,
        "num_recovered": len(firsts),
        "num_lost": len(lost),
        "lost": lost,
        "num_wrong": sum(row["difference"] > row["bound"] for row in rows),
        "largest_difference": max((row["difference"] for row in rows), default=0.0),
        "recovered_in": dict(sorted(Counter(r["phases"][0] for r in firsts.values()).items())),
        "by_plan": dict(sorted(Counter(row["plan"] for row in firsts.values()).items())),
        "by_rank": dict(sorted(Counter(str(row["who"]) for row in firsts.values()).items())),
        "median_seconds": _median([row["seconds"] for row in rows]),
        "slowest_seconds": max((row["seconds"] for row in rows), default=0.0),
    }


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


if __name__ == "__main__":
    main()
