"""The part of docs/accuracy.md about rows that were recorded on a card for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from recording.rowfile import card_slug

from .metrics import QUANTITIES, summarized
from .prose import NOT_RECORDED, RECORDED_HEAD, RECORDED_TAIL, WORKSPACES_HEAD
from .results import RECORDED
from .table import percent, summary_head, summary_line

Content = Mapping[str, Any]
SPLITS = ("development", "held-out")
_PASSES = ("forward", "input gradient", "weight gradient")


def recorded_section(gpu: Content, blind: Content | None) -> Iterator[str]:
    """Show what was predicted blind, what is predicted now, and each row before and after."""
    rows = [row for row in gpu["rows"] if row["source"] == RECORDED]
    if not rows:
        yield NOT_RECORDED
        return
    yield RECORDED_HEAD
    if blind is not None:
        yield from _blind(blind)
    yield from _cards_beside_each_other(rows)
    yield f"With the rules of {gpu['date']}:"
    yield ""
    for position, split in enumerate(SPLITS):
        lines = _sums(split, [row for row in rows if row["split"] == split])
        yield from list(lines)[2 * bool(position) :]
    yield ""
    yield RECORDED_TAIL
    if blind is not None:
        yield from _row_by_row(rows, blind)


def workspaces_section(found: Content | None) -> Iterator[str]:
    """Show how often cuDNN's workspaces are as predicted, by kind of convolution."""
    if found is None:
        return
    yield WORKSPACES_HEAD
    yield f"| kind | convolutions | held out | {' | '.join(_PASSES)} | under the high end |"
    yield "|---|---:|---:" + "|---:" * (len(_PASSES) + 1) + "|"
    now, held_out = (found["parts"][split] for split in SPLITS)
    earlier = found["before"]["parts"]["held-out"]
    for kind in now:
        if (each := held_out.get(kind)) is None:
            continue
        cells = [f"{earlier[kind][name]:.0%} -> {each[name]:.0%}" for name in _PASSES]
        yield (
            f"| {kind} | {now[kind]['convolutions']} | {each['convolutions']} | "
            f"{' | '.join(cells)} | {each['below_high']:.0%} |"
        )
    yield ""


def read_alike(rows: Sequence[Content], quantity: str) -> tuple[int, int]:
    """Count the steps that two cards have run, and those of which both read the same bytes."""
    readings: dict[str, list[int]] = {}
    for row in rows:
        entry = row["id"].removeprefix(f"memfit-{card_slug(row['device'])}-")
        if found := row.get("figures", {}).get(quantity):
            readings.setdefault(entry, []).append(found["measured_bytes"])
    pairs = [each for each in readings.values() if len(each) > 1]
    return len(pairs), sum(len(set(each)) == 1 for each in pairs)


def _cards_beside_each_other(rows: Sequence[Content]) -> Iterator[str]:
    counts = {quantity: read_alike(rows, quantity) for quantity in QUANTITIES}
    num_steps = max(num for num, _ in counts.values())
    if num_steps:
        alike = ", ".join(f"{quantity} bytes of {same}" for quantity, (_, same) in counts.items())
        yield (
            f"Of {num_steps} steps that both cards have run, both read the same to the byte: "
            f"{alike}. So the rows of the second card say of it, not of other models."
        )
        yield ""


def _blind(blind: Content) -> Iterator[str]:
    """Sum up what was predicted before it was measured, by day and card."""
    groups: dict[tuple[str, str], list[Content]] = {}
    for row in blind["rows"]:
        groups.setdefault((row["blind_on"], row["device"]), []).append(row)
    for (day, card), rows in groups.items():
        yield f"Blind ({day}, {card}):"
        yield ""
        yield from _sums("all", rows)
        yield ""


def _sums(title: str, rows: Sequence[Content]) -> Iterator[str]:
    """Sum up the errors of rows, with the head of a table."""
    yield from summary_head()
    for quantity in QUANTITIES:
        figures = [row["figures"][quantity] for row in rows if row["failure"] is None]
        errors = [each["error"] for each in figures if each["error"] is not None]
        covered = [
            each["low_bytes"] <= each["measured_bytes"] <= each["high_bytes"]
            for each in figures
            if each["measured_bytes"]
        ]
        yield summary_line(asdict(summarized(title, quantity, errors, covered)))


def _row_by_row(rows: Sequence[Content], blind: Content) -> Iterator[str]:
    """Show the blind error of each row beside the one of now."""
    before = {row["id"]: row for row in blind["rows"]}
    names = [f"{quantity}, blind | now" for quantity in QUANTITIES]
    yield f"| row | for | {' | '.join(names)} |"
    yield "|---|---" + "|---:" * (2 * len(QUANTITIES)) + "|"
    for row in rows:
        cells = [
            percent(_error(each, quantity), signed=True)
            for quantity in QUANTITIES
            for each in (before.get(row["id"], {}), row)
        ]
        yield f"| `{row['id']}` | {row['split']} | {' | '.join(cells)} |"
    yield ""


def _error(row: Content, quantity: str) -> float | None:
    return row.get("figures", {}).get(quantity, {}).get("error")
