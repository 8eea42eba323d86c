"""Ordinary training loops that run out of memory at random operators, compared to the bit.

Run: python benchmarks/bench_guard_scenarios.py [--each 10] [--only WORDS]   (some minutes)

Every loop trains six steps around ``run.step`` and has some state of its own: in weights that the
caller changes, in optimizers, layers, hooks, closures, generators, batches. It is run once
undisturbed, and then again and again with an error at a random operator: of forward, backward and
update in turn, and of what the guard itself does. Compared is everything that can be reached from
model, optimizer, loss, caller's records and random generators.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import guard_scenarios.loops  # noqa: F401 - fills the collection
import torch
from guard_scenarios.injection import Fault, carried_out, drawn_faults, judged
from guard_scenarios.training import SCENARIOS, Scenario
from results_file import RESULTS, load_result, save_result

_NAME = "guard_scenarios"
_HELD_OUT = "held out"
_BAD = ("different-unsaid", "ended-wrong-reason")


def main() -> None:
    """Run every scenario."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--each", type=int, default=10, help="errors per scenario")
    parser.add_argument("--only", default="", help="scenarios with these words in their names")
    parser.add_argument("--seed", default="", help="other operators")
    parser.add_argument("--as-before", action="store_true", help="keep as what was found before")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [each for name, each in SCENARIOS.items() if arguments.only in name]
    later = [each for each in chosen if each.name.startswith(_HELD_OUT)]
    figures = _figures([each for each in chosen if each not in later], arguments)
    if arguments.only:
        return
    kept = load_result(_NAME) if (RESULTS / f"{_NAME}.json").exists() else {}
    if arguments.as_before:
        save_result(_NAME, {**kept, "before": figures})
        return
    notes = {name: kept[name] for name in ("before", "held_out_first_try") if name in kept}
    save_result(_NAME, {**figures, "held_out": _figures(later, arguments), **notes})


def _figures(scenarios: Sequence[Scenario], arguments: argparse.Namespace) -> dict[str, Any]:
    """Carry scenarios out and count how they end."""
    rows = [row_of(each, arguments.each, arguments.seed) for each in scenarios]
    outcomes = Counter[str]()
    for row in rows:
        outcomes.update(row["outcomes"])
    print(dict(outcomes), len(rows))
    figures = {"num_scenarios": len(rows), "num_errors": outcomes.total()}
    return {**figures, "outcomes": dict(sorted(outcomes.items())), "rows": rows}


def row_of(scenario: Scenario, count: int, seed: str) -> dict[str, Any]:
    """Carry a scenario out with some errors."""
    started = time.perf_counter()
    undisturbed = carried_out(scenario, Fault())
    assert not undisturbed.error, f"{scenario.name}: {undisturbed.error}"
    outcomes: Counter[str] = Counter()
    details: list[str] = []
    for fault in drawn_faults(undisturbed.places, count, scenario.name + seed):
        verdict = judged(scenario, fault, undisturbed)
        outcomes[verdict.outcome] += 1
        if verdict.outcome in _BAD:
            details.append(f"{verdict.place} {fault}: {verdict.outcome}: {verdict.detail}")
    row = {"scenario": scenario.name, "outcomes": dict(sorted(outcomes.items()))}
    print(f"{time.perf_counter() - started:5.1f} s", row, flush=True)
    for detail in details:
        print("      ", detail, flush=True)
    return row


if __name__ == "__main__":
    main()
