"""Sections on runs: how they end when something fails, what they cost, and what leaks they name."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.units import format_bytes, format_seconds

from .blocks import Figures, table

_OUTCOMES = {
    "equal": "equal to the bit",
    "said": "said at the start, and ended with that reason",
    "ended-true-reason": "ended with the true reason",
    "ended-wrong-reason": "ended with a wrong reason",
    "different-unsaid": "another state, unsaid",
}


def run_overhead(figures: Figures) -> Iterator[str]:
    """Say what a run adds to a bare loop."""
    low, _, high = figures["quartiles_of_ratio"]
    yield (
        f"ConvE on UMLS, batch {figures['batch_size']}, blocks of ten steps in turn: median "
        f"ratio {figures['median_ratio']:.3f} (quartiles {low:.3f} to {high:.3f}), "
        f"{figures['num_steps_each']} steps each."
    )


def faults(figures: Figures) -> Iterator[str]:
    """Say what runs end with that fail at random operators."""
    yield (
        "Five steps with dropout and a learning-rate schedule; out-of-memory errors are raised "
        "at random operators of step and guard. Compared with an undisturbed run: losses, "
        "parameters, buffers, optimizer states, learning rate, random states, number of steps. "
        f"{figures['num_points']} errors, {figures['num_wrong']} runs that end otherwise."
    )
    yield table(
        "case | errors | wrong | largest difference | recovered in",
        "lllll",
        (
            (row["case"], row["num_points"], row["num_wrong"], _difference(row), _places(row))
            for row in figures["rows"]
        ),
    )
    yield (
        "Where no recovery is counted the error fell into what the guard itself does and was "
        "simply done again. Under smaller micro-batches sums are rounded otherwise. Of two "
        "ranks one fails, on gloo; a run that takes more than 20 s counts as wrong."
    )


def sharded_faults(figures: Figures) -> Iterator[str]:
    """Say what runs on several ranks end with, where one of those fails."""
    places = ", ".join(f"{place} {count}" for place, count in figures["recovered_in"].items())
    yield (
        f"{figures['num_faults']} errors on one of {figures['num_ranks']} ranks (gloo, fp64) that "
        "share a small model by FSDP2, with clipping and batches that are not even; the rank and "
        "the operator are random. Compared with an undisturbed run: parameters and optimizer "
        f"states on all ranks. {figures['num_lost']} runs that hang or end, {figures['num_wrong']} "
        f"that end otherwise. Steps undone: {figures['num_recovered']} ({places}); the other "
        "errors fell into what the guard itself does. Under the same plan again the results are "
        "equal to the bit, with recomputed blocks or half the micro-batch the largest difference "
        f"is {figures['largest_difference']:.1e}. A run of four steps with an error takes "
        f"{figures['median_seconds']:.1f} s in the median, {figures['slowest_seconds']:.1f} s at "
        "most, four ranks on two busy cores."
    )


def chaos(figures: Figures) -> Iterator[str]:
    """Say how many runs were broken at random, and in how many a promise was."""
    thousands = ", ".join(map(str, figures["num_violations_by_thousand"]))
    yield (
        f"{figures['num_runs']:,} runs drawn at random ([chaos.md](chaos.md)), "
        f"{figures['num_of_several_ranks']} of them on 2 or 4 ranks over gloo; a fault was met in "
        f"{figures['num_struck']:,}. Runs that broke a promise: {figures['num_violations']} "
        f"(by thousand: {thousands}; {figures['num_violations_in_last_thousand']} in the last "
        "thousand)."
    )
    yield table(
        "kind | runs | that met a fault",
        "lrr",
        (
            (kind, f"{found['runs']:,}", f"{found['struck']:,}")
            for kind, found in figures["by_kind"].items()
        ),
    )
    counts = figures["by_fault"].items()
    yield f"Faults drawn: {', '.join(f'{name} {count:,}' for name, count in counts)}."
    counts = figures["by_strategy"].items()
    yield f"Strategies of their plans: {', '.join(f'{name} {count:,}' for name, count in counts)}."


def gloo(figures: Figures) -> Iterator[str]:
    """Say how pairs of ranks ended whose heaps were checked."""
    counts = ", ".join(
        f"{row['checks']} {row['ranks']} {row['end']}"
        for row in sorted(figures["rows"], key=lambda row: row["checks"])
    )
    ended = sum(row["ranks"] for row in figures["rows"] if row["end"] != "done")
    yield (
        f"{figures['runs']} pairs of ranks that talk through gloo, under glibc's checks of the "
        f"heap in turn; {ended} ranks ended otherwise than they should. Ranks by what was set: "
        f"{counts}."
    )


def _difference(row: Figures) -> str:
    found = row["largest_difference"]
    if found is None:
        return "not equal"
    return "none, to the bit" if found == 0 else f"{found:.1e}"


def _places(row: Figures) -> str:
    places = row.get("recovered_in") or {}
    return ", ".join(f"{place} {count}" for place, count in places.items()) or "-"


def scenarios(figures: Figures) -> Iterator[str]:
    """Say what loops with state of their own end with that fail at random operators."""
    parts = (
        ("before the guard knew what a step changes", figures["before"]["outcomes"]),
        ("now", figures["outcomes"]),
        ("ten loops written afterwards, first run", figures["held_out_first_try"]["outcomes"]),
        ("the same, after what they showed was mended", figures["held_out"]["outcomes"]),
    )
    yield (
        f"{figures['num_errors']} out-of-memory errors at random operators of "
        f"{figures['num_scenarios']} ordinary training loops that keep state: teachers moved "
        "in forward, generators of their own, queues, optimizers with states beside the "
        "parameters', hooks, counters. Everything that is left is compared with an undisturbed "
        "run."
    )
    yield table(
        f"| {' | '.join(_OUTCOMES.values())}",
        "l" * (1 + len(_OUTCOMES)),
        ((name, *(found.get(each, 0) for each in _OUTCOMES)) for name, found in parts),
    )


def guard_overhead(figures: Figures) -> Iterator[str]:
    """Say what guard, monitor and journal cost."""
    yield (
        "Guarded steps with a journal against a bare loop, in turns, with new models in every "
        "round; in brackets the range over the rounds. The guard alone is what it adds to a "
        "run with monitor and journal, as a part of the bare step. All time counts, so the "
        "files that cut updates go back to and the steps that are watched do as well. Two bare "
        "loops are compared in the same way, which shows how far the machine can be trusted. What "
        "the first second of steps took more than bare ones is paid once, and stands apart."
    )
    yield table(
        "layers | parameters | bare step | guarded: bare | guard alone | bare: bare | once "
        "| steps each",
        "llllllll",
        (
            (
                f"{row['width']} x {row['num_layers']}, batch {row['batch_size']}",
                f"{row['num_parameters'] / 1e6:.1f} M",
                format_seconds(row["bare_step_seconds"]),
                _with_range(row["ratio_of_sums"], row["ratios_of_rounds"]),
                _with_range(row["guard_share"], row["guard_shares_of_rounds"]),
                _with_range(row["ratio_of_two_bare_loops"], row["ratios_of_bare_rounds"]),
                format_seconds(row["first_extra_seconds"]),
                row["num_steps_each"],
            )
            for row in figures["rows"]
        ),
    )


def _with_range(ratio: float, ratios: list[float]) -> str:
    return f"{ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def watch_overhead(figures: Figures) -> Iterator[str]:
    """Say what watching a script costs."""
    yield (
        f"A perceptron with steps of {figures['bare_step_seconds'] * 1e3:.0f} ms, with a data "
        "loader and without a budget, blocks of ten steps in turn, "
        f"{figures['num_steps_each']} steps each: median ratio "
        f"{figures['median_ratio_of_blocks']:.3f}, all the time together "
        f"{figures['ratio_of_all_time']:.3f}. The hooks themselves take "
        f"{figures['fraction_in_hooks']:.2%} of the time. Before that, once: "
        f"{figures['attach_seconds']:.2f} s to attach, and "
        f"{figures['first_steps_extra_seconds']:.2f} s for the first steps, three of which are "
        "always watched. Leaks are not looked for here."
    )


def leaks(figures: Figures) -> Iterator[str]:
    """Say which planted leaks are named, and what the finder costs."""
    low, _, high = figures["quartiles_of_ratio"]
    yield (
        f"`python benchmarks/bench_leaks.py`, {figures['date']}, torch {figures['torch']}, CPU, "
        f"{figures['num_threads']} thread, the finder as it comes:"
    )
    yield (
        f"- {figures['num_planted']} planted leaks: {figures['num_holders_named']} holders and "
        f"{figures['num_lines_named']} of {figures['num_lines_wanted']} lines named rightly.\n"
        f"- {figures['num_clean']} clean runs: {figures['num_alarms']} alarms.\n"
        f"- A step of {format_seconds(figures['bare_step_seconds'])} takes "
        f"{figures['median_ratio']:.3f} times as long with `boundary` (quartiles {low:.2f} to "
        f"{high:.2f}, blocks in turns). The calls took {figures['spent_seconds']:.2f} s of "
        f"{figures['run_seconds']:.0f} s; the budget was {figures['budget_seconds']:.2f} s. "
        f"One at which nothing is due takes {format_seconds(figures['boundary_seconds'])}."
    )
    yield table(
        "planted | kind | found after | holder | line",
        "llrll",
        (
            (
                row["name"],
                f"`{row['kind']}`",
                f"{row['found_after_steps']} steps" if row["found_after_steps"] else "not found",
                f"`{row['holder']}`" if row["is_holder_named"] else "no",
                "named" if row["is_line_named"] else "no",
            )
            for row in figures["rows"]
        ),
    )


def lightning(figures: Figures) -> Iterator[str]:
    """Say what the callback does to modules that know nothing of memfit."""
    yield (
        "Modules as people write them, planned from their trainers for half of the plain peak and "
        "trained for 20 steps with and without the callback. Differences are the largest of "
        "any weight, over the largest weight; beside those in fp32 stands what becomes of initial "
        "weights that differ by 1e-7, without memfit. A shortage of memory in one operator of "
        "backward is undone; checkpoints of either training go on in the other. The measured peak "
        "is that of the largest batch; predicted against measured is on that batch as well."
    )
    yield table(
        "module | plan | plain peak | budget | measured | predicted | weights, fp64 | fp32 "
        "| rounding alone, fp32 | after a shortage | resumed",
        "lllllllllll",
        (
            (
                row["module"],
                ", ".join(each.partition("(blocks")[0] for each in row["strategies"]),
                format_bytes(row["plain_peak_bytes"]),
                format_bytes(row["budget_bytes"]),
                format_bytes(row["measured_peak_bytes"]),
                f"{row['prediction_error'] + 0.0:+.2%}",
                f"{row['difference_fp64']:.0e}",
                f"{row['difference_fp32']:.0e}",
                f"{row['difference_fp32_of_rounding']:.0e}",
                f"{row['difference_after_shortage']:.0e}",
                f"{max(row['difference_resumed_without'], row['difference_resumed_with']):.0e}",
            )
            for row in figures["rows"]
        ),
    )
    for cost in figures["cost"].values():
        yield (
            f"A step of {format_seconds(cost['alone_step_seconds'])} takes "
            f"{_with_range(cost['ratio'], cost['quartiles_of_ratio'])} of its processor time under "
            "the callback, guarded, without strategies (median and quartiles of pairs of runs)."
        )


def transformers(figures: Figures) -> Iterator[str]:
    """Say what a plan does to trainings of transformers that know nothing of memfit."""
    yield (
        "Trainers as people write them, planned for half of the plain peak and trained for 20 "
        "steps with and without the plan. Differences are the largest of any weight, over the "
        "largest weight; beside those in fp32 stands what becomes of initial weights that differ "
        "by 1e-7, without memfit. A shortage of memory in one operator of backward is undone; "
        "checkpoints of either training go on in the other. Measured is the largest batch."
    )
    yield table(
        "training | plan | plain peak | predicted | budget | measured | predicted | weights, fp64 "
        "| fp32 | rounding alone, fp32 | after a shortage | resumed",
        "llllllllllll",
        (
            (
                row["training"],
                ", ".join(each.partition("(blocks")[0] for each in row["strategies"]),
                format_bytes(row["plain_measured_on_largest_batch_bytes"]),
                f"{row['plain_prediction_error'] + 0.0:+.2%}",
                format_bytes(row["budget_bytes"]),
                format_bytes(row["measured_peak_bytes"]),
                f"{row['prediction_error'] + 0.0:+.2%}",
                f"{row['difference_fp64']:.0e}",
                f"{row['difference_fp32']:.0e}",
                f"{row['difference_fp32_of_rounding']:.0e}",
                f"{row['difference_after_shortage']:.0e}",
                f"{max(row['difference_resumed_without'], row['difference_resumed_with']):.0e}",
            )
            for row in figures["rows"]
        ),
    )
