"""Sections on what is promised of pieces, and what is true of them."""

from __future__ import annotations

from collections.abc import Iterator

from .blocks import Figures, table

_HALVES = {
    "blind": "written before any public code was read",
    "public": "after public repositories",
}


def exactness(figures: Figures) -> Iterator[str]:
    """Say how promises of exactness compare with the truth."""
    yield (
        "Losses and models of ordinary practice. What is true of each is computed directly, in "
        "fp64: gradients, loss and all that a step leaves, whole and in four pieces. What is "
        "promised is run beside the plain step as well."
    )
    yield table(
        "half | steps | promised and false | others: refuted / not known | separable: proved "
        "| of those that look at no values | refuted though separable",
        "lllllll",
        ((name, *_half(half, figures)) for half, name in _HALVES.items()),
    )
    yield (
        "Refuted counts what is carried as well: steps whose forward changes something "
        "(spectral norm, counters), which accumulating gradients by hand would get wrong. "
        "memfit puts that back between pieces, and its run was compared with the plain step."
    )


def _half(half: str, figures: Figures) -> tuple[object, ...]:
    counts = figures[half]
    blind = [
        row["verdict"] == "proved"
        for row in figures["rows"]
        if row["half"] == half and row["true_class"] != "different" and not row["reads_values"]
    ]
    refuted = counts["num_different_refuted"] + counts["num_carried"]
    return (
        counts["num_cases"],
        len(counts["false"]) + len(counts["broken"]),
        f"{refuted} / {counts['num_different_not_known']}",
        f"{counts['num_kept_proved']} of {counts['num_kept']}",
        f"{sum(blind)} of {len(blind)}",
        len(counts["too_timid"]),
    )


def random_programs(figures: Figures) -> Iterator[str]:
    """Say what is proved of random programs."""
    yield (
        "Two to seven random operators behind a small model, and a loss of random terms; most "
        "mix samples somewhere. Their gradients, whole and in pieces, are computed directly in "
        "fp64 for three draws of weights and batch."
    )
    outcomes = ("proved", "not_known", "refuted")
    counts = {
        words: [int(figures.get(f"{true}_{each}", 0)) for each in outcomes]
        for true, words in (("same", "the same"), ("other", "another"))
    }
    yield table(
        "in pieces the gradient is | programs | proved | not known | refuted",
        "lllll",
        ((words, sum(each), *each) for words, each in counts.items()),
    )
    yield f"Proved, and another gradient: {len(figures['false'])}."
