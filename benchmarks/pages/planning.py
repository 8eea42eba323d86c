"""Sections on plans: what they cost, how good they are, and how long they take to find."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from statistics import median

from memfit.prediction.budget import read_budget
from memfit.units import GIB, format_bytes, format_seconds

from .blocks import Figures, table

_KEPT = re.compile(r"keep=[^)]*")
"""What a block keeps is a long list of operators."""
_SETTING = re.compile(r"\(blocks=.*\)")
"""Which blocks are run again, and what of them is kept."""
_SOON_SECONDS = 10
_DONE_SECONDS = 30
_AT_ONCE_SECONDS = 5
"""What the command is to take for the ordinary trainings, and once more."""
_NEVER = float("inf")


def chain(figures: Figures) -> Iterator[str]:
    """Compare time and memory of plans for many like blocks, beside other tools."""
    yield (
        "A transformer of 16 blocks, width 256, 512 tokens, batch 4, AdamW. "
        f"{_how_timed(figures)} Rows of memfit are plans for a budget, found with `--measure`."
    )
    yield from _chain_rows(figures)


def chain_on_card(figures: Figures) -> Iterator[str]:
    """Compare the same on a card, where the step is short for its operators."""
    yield (
        "The same chain on an NVIDIA H200, of width 1024, 1024 tokens, batch 16, bfloat16, with "
        f"growing segments for all; a plain step takes {1000 * figures['plain_step_seconds']:.0f} "
        f"ms. {_how_timed(figures)} Rows of memfit are plans as they were made before this was "
        "known: 30 seconds were given for each, and no plan was run within them, as the search "
        "had taken them; of the four steps that were timed together two were of those in which "
        "its checkpoints look at every operator, which few of many steps are. **Both plans take "
        "longer than torch's own checkpoints of whole blocks, with more memory**: the host did "
        "not keep ahead of the card, which was priced as nothing. Since then [it has a "
        "price](how-planning-works.md#times), four tenths of the seconds are left for running "
        "plans, and for these budgets other plans are made; how long those take was not measured."
    )
    yield from _chain_rows(figures)


def _how_timed(figures: Figures) -> str:
    return (
        "The activation peak is what a step takes on top of what lives when it begins, as a share "
        f"of the plain step's; the time is the median of {figures['num_rounds']} ratios to the "
        "plain steps before and after it, with quartiles."
    )


def _chain_rows(figures: Figures) -> Iterator[str]:
    rows = figures["rows"]
    yield table("| activation peak | share | time | quartiles", "lrrrl", map(_chain_row, rows))
    yield "\n".join(_beside_peers(rows))
    if "left_out" in figures:
        yield f"Left out: {figures['left_out']}."


def _chain_row(row: Figures) -> tuple[str, ...]:
    low, _, high = row["quartiles_of_time_ratio"]
    return (
        row["name"],
        format_bytes(row["activation_bytes"]),
        f"{row['memory_ratio']:.3f} x",
        f"{row['time_ratio']:.2f} x",
        f"{low:.2f} to {high:.2f}",
    )


def _beside_peers(rows: Sequence[Figures]) -> Iterator[str]:
    """Name, for each peer that saves memory, memfit's fastest plan that takes no more."""
    plans = [row for row in rows if row["name"].startswith("memfit")]
    for peer in rows[1:]:
        if peer in plans or peer["memory_ratio"] >= 1:
            continue
        within = [p for p in plans if p["activation_bytes"] <= peer["activation_bytes"]]
        best = min(within, key=lambda plan: plan["time_ratio"], default=None)
        answer = (
            "no plan was made" if best is None else f"{best['time_ratio']:.2f} x ({best['name']})"
        )
        yield f"- {peer['name']}: {peer['time_ratio']:.2f} x; memfit with no more memory: {answer}."


def large_plan(figures: Figures) -> Iterator[str]:
    """Say how long the command takes for a large model, and to refuse."""
    yield (
        "`memfit plan` as a whole command, imports included. The large job is a decoder of "
        "Llama's shape with 8 billion parameters in 32 blocks, all of them trained in bfloat16 "
        "with AdamW on 8 sequences of 4096 tokens, on a virtual H200."
    )
    yield table(
        "job | budget | exit code | seconds | answer",
        "lrrrl",
        (
            (
                f"`{row['job']}`",
                row["budget"] or "the card",
                row["exit_code"],
                f"{row['seconds']:.0f}",
                _KEPT.sub("keep=...", row["answer"]),
            )
            for row in (*figures["large"], figures["small"])
        ),
    )


def large_card(figures: Figures) -> Iterator[str]:
    """Hold the plans of a large model against what a card took under them."""
    yield (
        "The 8 B decoder of the section before, under its plans, on an NVIDIA H200. The plans and "
        "all that is predicted were made on two cores, without a card, before; no step of this "
        "model had been run on one. Each plan ran in a process of its own, four steps of one "
        "batch from one seed; peaks are of the steps after the first."
    )
    yield table(
        "budget | plan | allocated | measured | process | measured | seconds | measured | loss "
        "before step 4",
        "llrrrrrrr",
        map(_large_row, figures["cases"]),
    )
    losses = [case["measured"]["losses"] for case in figures["cases"]]
    apart = max(abs(a - b) / b for each in losses for a, b in zip(each, losses[-1], strict=True))
    held = sum(
        _process(c, "measured") <= read_budget(c["budget"] or "140GiB") for c in figures["cases"]
    )
    off = max(
        abs(_process(case, "predicted") / _process(case, "measured") - 1)
        for case in figures["cases"]
    )
    yield (
        f"{held} of {len(losses)} budgets held; the process takes what was predicted to within "
        f"{off:.2%}. The losses of four steps under the four plans are the same to {apart:.1e} "
        "(products in bfloat16, added up in pieces of other sizes)."
    )


def _process(case: Figures, kind: str) -> int:
    return int(case[kind]["process_bytes"])


def _large_row(case: Figures) -> tuple[str, ...]:
    predicted, measured = case["predicted"], case["measured"]
    names = dict.fromkeys(_SETTING.sub("", label) for label in case["strategies"])
    return (
        case["budget"] or "the card",
        " + ".join(names),
        f"{predicted['peak_allocated_bytes'] / GIB:.3f} GiB",
        f"{measured['peak_allocated_bytes'] / GIB:.3f} GiB",
        f"{predicted['process_bytes'] / GIB:.2f} GiB",
        f"{measured['process_bytes'] / GIB:.2f} GiB",
        f"{predicted['step_seconds']:.2f} s",
        f"{measured['step_seconds']:.2f} s",
        f"{measured['losses'][-1]:.4f}",
    )


def planning_time(figures: Figures) -> Iterator[str]:
    """Say how long planning takes, beside an earlier commit."""
    yield (
        f"Processor time of `memfit.plan`, beside that of commit {figures['other']}, job by job "
        "in turns."
    )
    yield table(
        "job | budget, share of the plain peak | seconds | before | ratio",
        "lllll",
        (
            (
                row["job"],
                row["fraction"],
                f"{row['seconds']:.1f}",
                f"{row['other_seconds']:.1f}",
                f"{row['seconds'] / row['other_seconds']:.2f}",
            )
            for row in figures["rows"]
        ),
    )
    yield f"All together {figures['total_ratio']:.2f}, median {figures['median_ratio']:.2f}."
    for row in figures["large"]:
        yield (
            f"A decoder of 8 billion parameters, 32 blocks, planned for an H200: "
            f"{row['seconds']:.0f} s, before {row['other_seconds']:.0f} s."
        )
    yield "Losses that couple a batch through encoders, planned at half of the plain peak:"
    coupled = figures["coupled"].items()
    yield table("job | seconds", "lr", ((name, f"{seconds:.0f}") for name, seconds in coupled))


def plan_command(figures: Figures) -> Iterator[str]:
    """Say how long the command takes from the shell to the saved plan, and where the time goes."""
    yield (
        "`memfit plan` as a whole command on two cores, imports included, for ordinary trainings "
        "on a virtual RTX 3060 and a decoder of 8 billion parameters on an H200. Planning begins "
        "once torch, memfit and the job's own file are imported; after the last better plan it is "
        "shown that nothing estimated is faster, and plans in reserve are recorded. Processor "
        "time and peak memory are those of the command with all its processes, and of its first. "
        "What is kept was recorded by the calls above for the same job; a plan that is known from "
        "them is told of before torch is imported. The loop is one of plain Python, timed before "
        "each command: where it takes longer, the machine was slower. " + figures.get("beside", "")
    )
    yield table(
        "job | asked | kept | known plan | first plan | all | planning begins | last plan | "
        "processor | memory | step | loop",
        "lllrrrrrrrrr",
        (
            (
                row["job"],
                f"`{row['asked']}`",
                "yes" if row["is_kept"] else "no",
                _after(row.get("known_plan_seconds")),
                _after(row.get("first_plan_seconds")),
                _after(row["seconds"]),
                _after(row.get("before_planning_seconds")),
                _after(row.get("last_plan_seconds")),
                _after(row["cpu_seconds"]),
                format_bytes(row["peak_bytes"]),
                _step_of(row),
                format_seconds(row["loop_seconds"]),
            )
            for row in figures["rows"]
        ),
    )
    yield from _before(figures)
    fresh = [row for row in figures["rows"] if not row["is_kept"]]
    soon = sum(row.get("first_plan_seconds", _NEVER) <= _SOON_SECONDS for row in fresh)
    done = sum(row["seconds"] <= _DONE_SECONDS for row in fresh if not row["exit_code"])
    later = [row["seconds"] for row in figures["rows"] if row["is_kept"]]
    at_once = sum(seconds <= _AT_ONCE_SECONDS for seconds in later)
    yield (
        f"With nothing kept, a first plan within {_SOON_SECONDS} s: {soon} of {len(fresh)}; done "
        f"within {_DONE_SECONDS} s: {done}. With what calls before have kept, done within "
        f"{_AT_ONCE_SECONDS} s: {at_once} of {len(later)}, the median {median(later):.0f} s."
    )


def known_plans(figures: Figures) -> Iterator[str]:
    """Say whether plans are as fast where earlier calls have recorded some."""
    rows = figures["rows"]
    both = [row for row in rows if row["alone"] and row["after_others"]]
    ratios = [row["after_others"]["step_seconds"] / row["alone"]["step_seconds"] for row in both]
    alike = sum(row["after_others"]["strategies"] == row["alone"]["strategies"] for row in both)
    yield (
        f"Budgets, of the ordinary trainings on a virtual `{figures['device']}`, asked in a row: "
        "each with what those before have kept, and with nothing kept. "
        f"Of {len(rows)} plans {alike} are the same; the slowest is estimated to take "
        f"{max(ratios):.4f} times as long as the one found with nothing kept, the fastest "
        f"{min(ratios):.4f} times."
    )
    yield table(
        "job | budget | step | step, nothing kept | ratio | considered | considered, nothing kept",
        "lrrrrrr",
        (
            (
                row["job"],
                row["budget"],
                format_seconds(row["after_others"]["step_seconds"]),
                format_seconds(row["alone"]["step_seconds"]),
                f"{ratio:.4f}",
                row["after_others"]["num_considered"],
                row["alone"]["num_considered"],
            )
            for row, ratio in zip(both, ratios, strict=True)
        ),
    )


def _before(figures: Figures) -> Iterator[str]:
    """Show what an earlier state of the code took for the same, in the same run."""
    asked = [row for row in figures["rows"] if "other_seconds" in row]
    rows = [row for row in asked if row["other_exit_code"] == 0]
    if not rows:
        return
    yield (
        f"Beside it, in turns, commit {figures['other']}, with what its own calls have kept. A "
        "shared machine's speed differs from one command to the next by a third and more:"
    )
    yield table(
        "job | asked | kept | first plan, before | first plan | all, before | all | ratio | "
        "processor, before | processor | step, before | step",
        "lllrrrrrrrrr",
        (
            (
                row["job"],
                f"`{row['asked']}`",
                "yes" if row["is_kept"] else "no",
                _after(row.get("other_first_plan_seconds")),
                _after(row.get("first_plan_seconds")),
                _after(row["other_seconds"]),
                _after(row["seconds"]),
                f"{row['seconds'] / row['other_seconds']:.2f}",
                _after(row["other_cpu_seconds"]),
                _after(row["cpu_seconds"]),
                format_seconds(row["other_step_seconds"]),
                _step_of(row),
            )
            for row in rows
        ),
    )
    firsts = [row for row in rows if row["is_kept"] is False]
    others = [row for row in rows if row["is_kept"] and "first_plan_seconds" in row]
    yield (
        f"The median of the ratios is {_median_ratio(firsts):.2f} with nothing kept, and "
        f"{_median_ratio(others):.2f} for another budget."
    )
    failed = dict.fromkeys(row["job"] for row in asked if row["other_exit_code"])
    if failed:
        yield f"It could not load {', '.join(failed)} beside the packages that are installed now."


def _median_ratio(rows: Sequence[Figures]) -> float:
    return median(row["seconds"] / row["other_seconds"] for row in rows)


def _step_of(row: Figures) -> str:
    """Say how long a planned step takes, or what came instead of a plan."""
    if row["exit_code"] < 0:
        return "given up"
    return format_seconds(row["step_seconds"]) if "step_seconds" in row else "no plan"


def _after(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.0f} s"
