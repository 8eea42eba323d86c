"""The section of the benchmark page on what is promised of pieces, and what is true of them."""

from __future__ import annotations

from typing import Any

from results_file import load_result

_HALVES = {
    "blind": "written before any public code was read",
    "public": "after public repositories",
}


_OUTCOMES = ("proved", "not_known", "refuted")


def exactness_section(heading: Any) -> list[str]:
    """Write how promises of exactness compare with the truth."""
    figures = load_result("exactness")
    rows = [_row(name, half, figures) for half, name in _HALVES.items()]
    return [
        *heading("What is promised of micro-batches", figures, "bench_exactness.py"),
        (
            "Losses and models of ordinary practice. What is true of each is computed directly, in "
            "fp64: gradients, loss and all that a step leaves, whole and in four pieces. What is "
            "promised is run beside the plain step as well."
        ),
        "",
        (
            "| half | steps | promised and false | others: refuted / not known | separable: proved "
            "| of those that look at no values | refuted though separable |"
        ),
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        (
            "Refuted counts what is carried as well: steps whose forward changes something "
            "(spectral norm, counters), which accumulating gradients by hand would get wrong. "
            "memfit puts that back between pieces, and its run was compared with the plain step."
        ),
        "",
    ]


def random_programs_section(heading: Any) -> list[str]:
    """Write what is proved of random programs."""
    figures = load_result("random_programs")

    def count(true: str, outcome: str) -> int:
        return int(figures.get(f"{true}_{outcome}", 0))

    return [
        *heading("What is proved of random programs", figures, "bench_random_programs.py"),
        (
            "Two to seven random operators behind a small model, and a loss of random terms; most "
            "mix samples somewhere. Their gradients, whole and in pieces, are computed directly in "
            "fp64 for three draws of weights and batch."
        ),
        "",
        "| in pieces the gradient is | programs | proved | not known | refuted |",
        "|---|---|---|---|---|",
        *(
            f"| {words} | {sum(count(true, each) for each in _OUTCOMES)} | "
            f"{' | '.join(str(count(true, each)) for each in _OUTCOMES)} |"
            for true, words in (("same", "the same"), ("other", "another"))
        ),
        "",
        f"Proved, and another gradient: {len(figures['false'])}.",
        "",
    ]


def planning_time_section(heading: Any) -> list[str]:
    """Write what proofs have added to planning."""
    figures = load_result("planning_time")
    return [
        *heading("What proofs add to planning", figures, "bench_planning_time.py"),
        (
            f"Processor time of `memfit.plan`, beside that of commit {figures['other']}, which "
            "proved nothing; job by job in turns."
        ),
        "",
        "| job | budget, share of the plain peak | seconds | before | ratio |",
        "|---|---|---|---|---|",
        *(
            f"| {row['job']} | {row['fraction']} | {row['seconds']:.1f} | "
            f"{row['other_seconds']:.1f} | {row['seconds'] / row['other_seconds']:.2f} |"
            for row in figures["rows"]
        ),
        "",
        f"All together {figures['total_ratio']:.2f}, median {figures['median_ratio']:.2f}.",
        "",
        *(
            f"A decoder of 8 billion parameters, 32 blocks, planned for an H200: "
            f"{row['seconds']:.0f} s, before {row['other_seconds']:.0f} s."
            for row in figures["large"]
        ),
        "",
    ]


def _row(name: str, half: str, figures: dict[str, Any]) -> str:
    counts = figures[half]
    kept = [row for row in figures["rows"] if row["half"] == half and _is_separable(row)]
    blind = [row["verdict"] == "proved" for row in kept if not row["reads_values"]]
    wrong = len(counts["false"]) + len(counts["broken"])
    refuted = counts["num_different_refuted"] + counts["num_carried"]
    return (
        f"| {name} | {counts['num_cases']} | {wrong} | "
        f"{refuted} / {counts['num_different_not_known']} "
        f"| {counts['num_kept_proved']} of {counts['num_kept']} | {sum(blind)} of {len(blind)} | "
        f"{len(counts['too_timid'])} |"
    )


def _is_separable(row: dict[str, Any]) -> bool:
    return bool(row["true_class"] != "different")
