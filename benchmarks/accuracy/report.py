"""Writes docs/accuracy.md from stored figures of GPUs, of other tools and of the CPU.

Nothing is predicted here; only the errors of other tools are worked out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from memfit.files import write_atomically
from memfit.units import format_bytes, format_fraction

from .left_out import left_out
from .metrics import QUANTITIES, summarized
from .peer_file import read_peers
from .prose import COLLECTED, CPU_LIMITS, HEAD, INFORMED, LEFT_OUT, SHORTFALLS, SOURCES
from .recorded import recorded_section, workspaces_section
from .results import ADAPTERS, SEVERAL_RANKS
from .table import percent, summary_head, summary_line

_ROOT = Path(__file__).parents[2]
PAGE = _ROOT / "docs" / "accuracy.md"
_RESULTS = _ROOT / "benchmarks" / "results"
_GOALS = {
    "allocated": {"median_abs_error": 0.01, "p95_abs_error": 0.03},
    "reserved": {"median_abs_error": 0.015, "p95_abs_error": 0.05},
    "process": {"median_abs_error": 0.015},
}
_COLLECTED_GOALS = {
    (SEVERAL_RANKS, "allocated"): {"median_abs_error": 0.015, "p95_abs_error": 0.05},
    (SEVERAL_RANKS, "reserved"): {"median_abs_error": 0.04},
    (ADAPTERS, "allocated"): {"median_abs_error": 0.01},
}
_COVERAGE_GOAL = 0.95
_WRONG_GOAL = 0.02
_UNCERTAIN_GOAL = 1 / 3
_LARGE_ERROR = 0.05
_COLUMNS = ("median_abs_error", "p95_abs_error", "worst_abs_error")
Content = Mapping[str, Any]


def write_page() -> None:
    """Write the page; a part whose figures are not stored says so."""
    gpu, blind = _load("accuracy_gpu"), _load("accuracy_blind")
    workspaces = _load("workspaces")
    write_atomically(PAGE, page(gpu, _load("accuracy"), read_peers(), blind, workspaces))


def _load(name: str) -> Content | None:
    path = _RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def page(
    gpu: Content | None,
    cpu: Content | None,
    peers: Sequence[Content],
    blind: Content | None = None,
    workspaces: Content | None = None,
) -> str:
    """Return the whole page; ``blind`` is what was predicted before a reading was looked at."""
    lines = [HEAD]
    if gpu is None:
        lines += ["No row of a GPU has been scored here yet: `make accuracy`.", ""]
    else:
        lines += [*_summary(gpu), *_collected(gpu), *_shortfalls(gpu), INFORMED]
        lines += recorded_section(gpu, blind)
        lines += workspaces_section(workspaces)
        lines += [*_peer_summary(gpu, peers), *_sources(gpu, peers)]
    if cpu is not None:
        lines += _cpu(cpu)
    return "\n".join(lines).rstrip("\n") + "\n"


# --- GPUs ----------------------------------------------------------------------------------------


def _summary(gpu: Content) -> Iterator[str]:
    yield "## Summary"
    yield ""
    rows = gpu["rows"]
    scored = sum(row["failure"] is None for row in rows)
    yield (
        f"{scored} of {len(rows)} rows could be rebuilt and recorded ({gpu['date']}, torch "
        f"{gpu['torch']}, no GPU). Errors are predicted / measured - 1; "
        "median, p95 and worst are of their sizes."
    )
    yield ""
    yield from summary_head()
    for each in (*gpu["overall"], *gpu["summaries"]):
        if each["rows"]:
            yield summary_line(each)
    yield ""
    yield from _verdict_table(gpu["verdicts"])
    yield from goal_table(gpu)


def _verdict_table(verdicts: Content) -> Iterator[str]:
    """Show how often "fits" and "does not fit" were wrong."""
    yield (
        "A verdict is the answer to whether the step fits a limit: four budgets around each "
        "reading (x 0.9, 0.95, 1.05, 1.1) and the card's memory against predicted process bytes; "
        "limits under which the authors ran again (`cap`), and cards on which their run failed "
        "(`oom`), against the least memory in which the replayed step survives. A limit inside the "
        "stated interval is uncertain; wrong counts those too."
    )
    yield ""
    yield "| rows of | verdicts | wrong | said to fit, does not | uncertain | wrong and certain |"
    yield "|---|---:|---:|---:|---:|---:|"
    for source, count in verdicts.items():
        yield _verdict_line(source, count)
        for kind, each in count["by_kind"].items() if source == "all" else ():
            yield _verdict_line(f"all, `{kind}`", each)
    yield ""


def _verdict_line(title: str, count: Content) -> str:
    wrong = f"{count['wrong']} ({percent(_wrong_fraction(count))})"
    return (
        f"| {title} | {count['all']} | {wrong} | {count['wrongly_fits']} | {count['uncertain']} "
        f"| {count['wrong_and_certain']} |"
    )


def _wrong_fraction(count: Content) -> float | None:
    return count["wrong"] / count["all"] if count["all"] else None


def goal_table(gpu: Content) -> Iterator[str]:
    """Hold the sums over all rows against the goals, a line each."""
    yield "| goal over all rows | reached | |"
    yield "|---|---:|---|"
    for each in gpu["overall"]:
        for name, goal in _GOALS[each["quantity"]].items() if each["rows"] else ():
            title = f"{each['quantity']}, {name.partition('_')[0]} at most {percent(goal)}"
            yield _goal_line(title, each[name], each[name] <= goal)
        if each["rows"]:
            title = f"{each['quantity']}, at least {percent(_COVERAGE_GOAL)} inside the interval"
            yield _goal_line(title, each["coverage"], each["coverage"] >= _COVERAGE_GOAL)
    wrong = _wrong_fraction(gpu["verdicts"]["all"])
    if wrong is not None:
        yield _goal_line(
            f"verdicts, at most {percent(_WRONG_GOAL)} wrong", wrong, wrong <= _WRONG_GOAL
        )
        counts = gpu["verdicts"]["all"]
        uncertain = counts["uncertain"] / counts["all"]
        yield _goal_line(
            "verdicts, at most a third uncertain", uncertain, uncertain <= _UNCERTAIN_GOAL
        )
    yield ""


def _goal_line(title: str, reached: float, is_met: bool) -> str:
    return f"| {title} | {percent(reached)} | {'met' if is_met else 'not met'} |"


def _collected(gpu: Content) -> Iterator[str]:
    """Sum up the rows of several ranks and of adapters, and hold them against their goals."""
    found = gpu.get("collected") or ()
    if not found:
        return
    yield COLLECTED
    yield from summary_head()
    yield from (summary_line(each) for each in found)
    yield ""
    yield "| goal over these rows | reached | |"
    yield "|---|---:|---|"
    for each in found:
        goals = _COLLECTED_GOALS.get((each["source"], each["quantity"]), {})
        for name, goal in goals.items():
            title = f"{each['source']}: {each['quantity']}, {name.partition('_')[0]}"
            yield _goal_line(f"{title} at most {percent(goal)}", each[name], each[name] <= goal)
    yield ""
    yield from _held_on_others(gpu)


def _held_on_others(gpu: Content) -> Iterator[str]:
    """Show whether intervals hold on sources that have not set their margins."""
    yield LEFT_OUT
    yield "| left out | quantity | rows | margin of ranks from the others | inside |"
    yield "|---|---|---:|---:|---:|"
    for each in left_out(gpu["rows"]):
        inside = percent(each.num_inside / each.num_rows)
        named = f"| {each.source} | {each.quantity} | {each.num_rows} "
        yield f"{named}| {percent(each.margin)} | {inside} |"
    yield ""


def _shortfalls(gpu: Content) -> Iterator[str]:
    """List what is far off, then say why."""
    yield "## What falls short, and why"
    yield ""
    large = [
        f"`{row['id']}` ({name} {percent(figure['error'], signed=True)})"
        for row in gpu["rows"]
        for name, figure in row.get("figures", {}).items()
        if name != "process" or row["figures"]["reserved"]["error"] is None
        if figure["error"] is not None and abs(figure["error"]) > _LARGE_ERROR
    ]
    if large:
        yield f"Off by more than {percent(_LARGE_ERROR)}: {', '.join(large)}."
        yield ""
    yield SHORTFALLS


def _sources(gpu: Content, peers: Sequence[Content]) -> Iterator[str]:
    """Show every row of every source."""
    for source in dict.fromkeys(row["source"] for row in gpu["rows"]):
        rows = [row for row in gpu["rows"] if row["source"] == source]
        cards = ", ".join(dict.fromkeys(str(row["device"]) for row in rows))
        yield f"## Rows of {source}"
        yield ""
        yield f"Card: {cards}. {SOURCES.get(source, '')}".rstrip()
        yield ""
        shown = [peer for peer in peers if _has_figures(peer, rows)]
        heads = ["row", "model", "measured", *QUANTITIES, *(peer["tool"] for peer in shown)]
        yield f"| {' | '.join(heads)} |"
        yield "|---|---" + "|---:" * (len(heads) - 2) + "|"
        for row in rows:
            yield _row_line(row, shown)
        yield ""
        yield from _reasons(rows, shown)


def _row_line(row: Content, peers: Sequence[Content]) -> str:
    name = f"| `{row['id']}` | {_described(row)} "
    if row["failure"] is not None:
        cells = ["", *("no prediction" for _ in QUANTITIES)]
    elif row["outcome"] == "oom":
        predicted = [format_bytes(row["figures"][name]["predicted_bytes"]) for name in QUANTITIES]
        cells = ["out of memory", *predicted]
    else:
        _, measured_bytes = _reading(row, "process")
        errors = [percent(row["figures"][name]["error"], signed=True) for name in QUANTITIES]
        cells = [format_bytes(measured_bytes or 0), *errors]
    cells += [percent(_peer_error(peer, row), signed=True) for peer in peers]
    return f"{name}| {' | '.join(cells)} |"


def _described(row: Content) -> str:
    """Say in a few words what the row trains."""
    size = f"{row['batch_size']}" + (f" x {row['seq_len']}" if row["seq_len"] else "")
    extra = [row["precision"], row["optimizer"], f"batch {size}"]
    if row.get("ranks", 1) > 1:
        extra.append(f"{row['ranks']} ranks")
    if row["is_adapted"]:
        extra.insert(0, "NF4 + LoRA" if row["is_quantized"] else "LoRA")
    return f"{row['model'].rpartition('/')[2]}, {', '.join(extra)}"


def _reasons(rows: Sequence[Content], peers: Sequence[Content]) -> Iterator[str]:
    """Say why there are rows without a figure."""
    failed = [row for row in rows if row["failure"] is not None]
    yield from (f"- `{row['id']}`: {' '.join(row['failure'].split())}" for row in failed)
    for peer in peers:
        reasons: dict[str, int] = {}
        for row in rows:
            figure = peer["figures"].get(row["id"])
            if isinstance(figure, str):
                reasons[figure] = reasons.get(figure, 0) + 1
        for reason, count in reasons.items():
            yield f"- {peer['tool']}, {count} rows: {reason}."
    yield ""


# --- other tools ---------------------------------------------------------------------------------


def _peer_summary(gpu: Content, peers: Sequence[Content]) -> Iterator[str]:
    """Compare with what other tools say of the rows that they can be asked about."""
    if not peers:
        return
    yield "## Other ways to predict, on the same rows"
    yield ""
    yield (
        "Stored in `benchmarks/accuracy/peer_figures.json`, written by "
        "`benchmarks/accuracy/peers.py`. Each is held against the quantity it speaks of, or "
        "against process bytes where that was not read. Beside each: memfit on exactly the same "
        "rows and readings. Asked as each tool is documented, by people who know memfit better."
    )
    yield ""
    yield "| tool | of | rows | median | p95 | worst | memfit: median | p95 | worst |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|"
    for peer in peers:
        pairs = [(_peer_error(peer, row), _own_error(peer, row)) for row in gpu["rows"]]
        both = [pair for pair in pairs if None not in pair]
        theirs = summarized("", "", [pair[0] for pair in both if pair[0] is not None])
        own = summarized("", "", [pair[1] for pair in both if pair[1] is not None])
        cells = [percent(getattr(each, name)) for each in (theirs, own) for name in _COLUMNS]
        title = f"{peer['tool']} {peer['version']} ({peer['date']})"
        yield f"| {title} | {peer['quantity']} | {len(both)} | {' | '.join(cells)} |"
    yield ""
    yield from (f"- {peer['tool']}: {peer['command']}." for peer in peers)
    yield ""


def _has_figures(peer: Content, rows: Sequence[Content]) -> bool:
    return any(isinstance(peer["figures"].get(row["id"]), int) for row in rows)


def _reading(row: Content, quantity: str) -> tuple[str, int | None]:
    """Return the reading of a quantity, or else of the widest that was read."""
    figures = row.get("figures", {})
    for name in (quantity, *reversed(QUANTITIES)):
        if name in figures and figures[name]["measured_bytes"]:
            return name, figures[name]["measured_bytes"]
    return quantity, None


def _peer_error(peer: Content, row: Content) -> float | None:
    figure = peer["figures"].get(row["id"])
    _, measured_bytes = _reading(row, peer["quantity"])
    if not isinstance(figure, int) or not measured_bytes:
        return None
    return figure / measured_bytes - 1


def _own_error(peer: Content, row: Content) -> float | None:
    name, measured_bytes = _reading(row, peer["quantity"])
    return row["figures"][name]["error"] if measured_bytes else None


# --- the CPU -------------------------------------------------------------------------------------


def _cpu(cpu: Content) -> Iterator[str]:
    """Show predicted and measured peaks on the CPU."""
    yield "## On the CPU"
    yield ""
    yield (
        "From `python benchmarks/bench_accuracy.py`. Each row is one job on `cpu`: the peak of "
        "allocated bytes in one steady step, predicted on fake tensors and measured from the CPU "
        "allocator's own events. Architectures are built from configs of the transformers package "
        "with random weights."
    )
    yield ""
    yield (
        f"{cpu['num_rows']} rows: median absolute error {cpu['median_abs_error_fraction']:.4%}, "
        f"95th percentile {cpu['p95_abs_error_fraction']:.3%}, worst "
        f"{cpu['worst_abs_error_fraction']:.3%}; {cpu['num_exact_to_the_byte']} rows agree to the "
        "byte."
    )
    if isa := cpu.get("onednn_max_cpu_isa"):
        yield ""
        yield (
            f"oneDNN was held to `ONEDNN_MAX_CPU_ISA={isa}`: what its kernels for AMX take is not "
            "known, and rows in bf16 are up to 1.1 % low with those."
        )
    yield ""
    yield "| architecture | optimizer | setting | predicted | measured | error | |"
    yield "|---|---|---|---:|---:|---:|---|"
    yield from (_cpu_line(row) for row in cpu["rows"])
    yield ""
    yield CPU_LIMITS


def _cpu_line(row: Content) -> str:
    names = f"| {row['architecture']} | {row['optimizer']} | {row['setting']} "
    if row["error_fraction"] is None:
        return f"{names}| | | | {row['note']} |"
    predicted, measured = format_bytes(row["predicted_bytes"]), format_bytes(row["measured_bytes"])
    error = format_fraction(row["error_fraction"])
    return f"{names}| {predicted} | {measured} | {error} | {row['note']} |"
