"""The sections of the benchmark page on guarded and watched runs."""

from __future__ import annotations

from typing import Any

from results_file import load_result

from memfit.units import format_seconds


def guard_sections(heading: Any) -> list[str]:
    """Write what runs that fail end with, and what guard, monitor and watch cost."""
    return [
        *_faults(heading),
        *_scenarios(heading),
        *_overhead(heading),
        *_watch_overhead(heading),
    ]


def _faults(heading: Any) -> list[str]:
    figures = load_result("guard_faults")
    rows = [
        f"| {row['case']} | {row['num_points']} | {row['num_wrong']} | {_difference(row)} | "
        f"{_places(row)} |"
        for row in figures["rows"]
    ]
    return [
        *heading("Runs that fail at random operators", figures, "bench_guard_faults.py"),
        (
            "Five steps with dropout and a learning-rate schedule; out-of-memory errors are raised "
            "at random operators of step and guard. Compared with an undisturbed run: losses, "
            "parameters, buffers, optimizer states, learning rate, random states, number of steps. "
            f"{figures['num_points']} errors, {figures['num_wrong']} runs that end otherwise."
        ),
        "",
        "| case | errors | wrong | largest difference | recovered in |",
        "|---|---|---|---|---|",
        *rows,
        "",
        (
            "Where no recovery is counted the error fell into what the guard itself does and was "
            "simply done again. Under smaller micro-batches sums are rounded otherwise. Of two "
            "ranks one fails, on gloo; a run that takes more than 20 s counts as wrong."
        ),
        "",
    ]


_OUTCOMES = {
    "equal": "equal to the bit",
    "said": "said at the start, and ended with that reason",
    "ended-true-reason": "ended with the true reason",
    "ended-wrong-reason": "ended with a wrong reason",
    "different-unsaid": "another state, unsaid",
}


def _scenarios(heading: Any) -> list[str]:
    figures = load_result("guard_scenarios")
    parts = (
        ("before the guard knew what a step changes", figures["before"]["outcomes"]),
        ("now", figures["outcomes"]),
        ("ten loops written afterwards, first run", figures["held_out_first_try"]["outcomes"]),
        ("the same, after what they showed was mended", figures["held_out"]["outcomes"]),
    )
    rows = [
        f"| {name} | {' | '.join(str(found.get(each, 0)) for each in _OUTCOMES)} |"
        for name, found in parts
    ]
    return [
        *heading("Training loops with state of their own", figures, "bench_guard_scenarios.py"),
        (
            f"{figures['num_errors']} out-of-memory errors at random operators of "
            f"{figures['num_scenarios']} ordinary training loops that keep state: teachers moved "
            "in forward, generators of their own, queues, optimizers with states beside the "
            "parameters', hooks, counters. Everything that is left is compared with an undisturbed "
            "run."
        ),
        "",
        f"| | {' | '.join(_OUTCOMES.values())} |",
        f"|---|{'---|' * len(_OUTCOMES)}",
        *rows,
        "",
    ]


def _difference(row: dict[str, Any]) -> str:
    found = row["largest_difference"]
    if found is None:
        return "not equal"
    return "none, to the bit" if found == 0 else f"{found:.1e}"


def _places(row: dict[str, Any]) -> str:
    places = row.get("recovered_in") or {}
    return ", ".join(f"{place} {count}" for place, count in places.items()) or "-"


def _overhead(heading: Any) -> list[str]:
    figures = load_result("guard_overhead")
    rows = [
        f"| {row['width']} x {row['num_layers']}, batch {row['batch_size']} | "
        f"{row['num_parameters'] / 1e6:.1f} M | {format_seconds(row['bare_step_seconds'])} | "
        f"{row['ratio_of_sums']:.3f} ({_range(row['ratios_of_rounds'])}) | "
        f"{row['guard_share']:.3f} ({_range(row['guard_shares_of_rounds'])}) | "
        f"{row['ratio_of_two_bare_loops']:.3f} ({_range(row['ratios_of_bare_rounds'])}) | "
        f"{format_seconds(row['first_extra_seconds'])} | {row['num_steps_each']} |"
        for row in figures["rows"]
    ]
    return [
        *heading("What guard, monitor and journal cost", figures, "bench_guard_overhead.py"),
        (
            "Guarded steps with a journal against a bare loop, in turns, with new models in every "
            "round; in brackets the range over the rounds. The guard alone is what it adds to a "
            "run with monitor and journal, as a part of the bare step. All time counts, so the "
            "files that cut updates go back to and the steps that are watched do as well. Two bare "
            "loops are "
            "compared in the same way, which shows how far the machine can be trusted. What the "
            "first second of steps took more than bare ones is paid once, and stands apart."
        ),
        "",
        (
            "| layers | parameters | bare step | guarded: bare | guard alone | bare: bare | once "
            "| steps each |"
        ),
        "|---|---|---|---|---|---|---|---|",
        *rows,
        "",
    ]


def _range(ratios: list[float]) -> str:
    return f"{min(ratios):.3f} to {max(ratios):.3f}"


def _watch_overhead(heading: Any) -> list[str]:
    figures = load_result("watch_overhead")
    return [
        *heading("What watching a script costs", figures, "bench_watch_overhead.py"),
        (
            f"A perceptron with steps of {figures['bare_step_seconds'] * 1e3:.0f} ms, with a data "
            "loader and without a budget, blocks of ten steps in turn, "
            f"{figures['num_steps_each']} steps each: median ratio "
            f"{figures['median_ratio_of_blocks']:.3f}, all the time together "
            f"{figures['ratio_of_all_time']:.3f}. The hooks themselves take "
            f"{figures['fraction_in_hooks']:.2%} of the time. Before that, once: "
            f"{figures['attach_seconds']:.2f} s to attach, and "
            f"{figures['first_steps_extra_seconds']:.2f} s for the first steps, three of which are "
            "always watched. Leaks are not looked for here."
        ),
        "",
    ]
