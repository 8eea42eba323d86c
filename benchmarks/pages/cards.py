"""The section on what was checked on a card."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from memfit.units import format_bytes, format_fraction

from .blocks import Figures, table

_KNOWN_BEFORE = {
    "h200": "Plain steps of these jobs and nine plans had been measured on such a card before, and "
    "rules changed by that; all other plans ran for the first time.",
    "h100-80gb": "No such card had been seen by memfit before; the jobs had been on an H200. The "
    "context of the process was a guess of 500 MiB then and is 742 to 758 MiB: that is the error "
    "of most process bytes here. The catalogue has it since.",
}
_WHY_NOT = {
    "no result": "the time on the card was over before its turn",
}


def card_checks(figures: Figures) -> Iterator[str]:
    """Show every case that was measured on the card, and name the others."""
    cases = figures["cases"]
    measured = [case for case in cases if case["measured"]]
    yield (
        f"On an {figures['card']}, cuDNN {figures['cudnn']}, transformers "
        f"{figures['transformers']}, {_runs(figures['revisions'])}. All was predicted before it "
        f"ran. {_KNOWN_BEFORE[figures['device']]}"
    )
    yield from _errors(measured)
    yield (
        "Each case has a process of its own. A budget bounds process bytes. The last two columns "
        "compare three steps with those as the job is: how far the parameters are apart, over how "
        "far they went, and what becomes of that where the same job runs twice."
    )
    yield table(
        "run | case | strategies | allocated, predicted | measured | error | reserved | process "
        "| budget | held | parameters apart | twice the same job",
        "rllrrrrrrlrr",
        map(_row, measured),
    )
    yield _budgets(measured)
    yield from _not_measured(cases)
    yield from _checks(figures["checks"])


def _runs(revisions: list[str]) -> str:
    if len(revisions) == 1:
        return f"in a run of the commit {revisions[0]}"
    return f"in runs of the commits {' and '.join(revisions)}"


def _errors(measured: list[Figures]) -> Iterator[str]:
    """Summarise how far predictions were off."""
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "process_bytes", "step_seconds")
    titles = ("allocated", "reserved", "process", "seconds of a step")
    rows = []
    for title, name in zip(titles, names, strict=True):
        errors = [case["predicted"][name] / case["measured"][name] - 1 for case in measured]
        sizes = sorted(map(abs, errors))
        rows.append(
            (
                title,
                len(errors),
                f"{statistics.median(sizes):.2%}",
                f"{sizes[math.ceil(0.9 * len(sizes)) - 1]:.2%}",
                format_fraction(min(errors)),
                format_fraction(max(errors)),
            )
        )
    yield table("quantity | cases | median | p90 | lowest | highest", "lrrrrr", rows)


def _row(case: Figures) -> Iterator[object]:
    predicted, measured = case["predicted"], case["measured"]
    yield case["run"]
    yield case["name"]
    yield ", ".join(f"`{each}`" for each in case["strategies"]) or "none"
    yield format_bytes(predicted["peak_allocated_bytes"])
    yield format_bytes(measured["peak_allocated_bytes"])
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "process_bytes"):
        yield format_fraction(predicted[name] / measured[name] - 1)
    budget = case["budget_bytes"]
    yield format_bytes(budget) if budget else ""
    yield ("yes" if _is_held(case) else "no") if budget else ""
    for name in ("with_plan", "plain_again"):
        yield _apart(case["same"].get(name))


def _apart(found: Figures | None) -> str:
    if found is None:
        return "not compared"
    return "to the bit" if found["to_the_bit"] else f"{found['parameters_of_change']:.0e}"


def _is_held(case: Figures) -> bool:
    return case["measured"]["process_bytes"] <= case["budget_bytes"]


def _budgets(measured: list[Figures]) -> str:
    """Say how many budgets were held, and by how much the others were missed."""
    bounded = [case for case in measured if case["budget_bytes"]]
    over = [case for case in bounded if not _is_held(case)]
    parts = [f"{len(bounded) - len(over)} of {len(bounded)} budgets were held."]
    if over:
        most = max(case["measured"]["process_bytes"] - case["budget_bytes"] for case in over)
        parts.append(f"The others were passed by up to {format_bytes(most)}.")
        told = sum(_is_uncertain(case) for case in over)
        parts.append(f"Of these {told} had been called uncertain.")
    return " ".join(parts)


def _is_uncertain(case: Figures) -> bool:
    """Return whether the budget lay inside the interval, as ``memfit plan`` says then."""
    interval = case["predicted"]["intervals"]["process"]
    return interval["low_bytes"] <= case["budget_bytes"] < interval["high_bytes"]


def _not_measured(cases: list[Figures]) -> Iterator[str]:
    """Name what was not measured, with the reason."""
    reasons: dict[str, list[str]] = {}
    for case in cases:
        if case["refused"]:
            reasons.setdefault(f"not run: {case['refused']}", []).append(_named(case))
        elif not case["measured"]:
            error = case["error"] or ""
            why = next((words for sign, words in _WHY_NOT.items() if error.startswith(sign)), error)
            reasons.setdefault(why.rstrip("."), []).append(_named(case))
    yield "Without a measurement:"
    yield "\n".join(
        f"- {reason.rstrip('.')}: {'; '.join(names)}." for reason, names in reasons.items()
    )


def _named(case: Figures) -> str:
    return f"{case['name']} (run {case['run']})"


def _checks(checks: list[Figures]) -> Iterator[str]:
    """Say what the commands and the guard did."""
    yield "Commands and the guard:"
    yield "\n".join(f"- {each['name']}: {_outcome(each)}" for each in checks)


def _outcome(check: Figures) -> str:
    if "limited" in check:
        limited = check["limited"]
        return (
            f"ran out of memory under a limit of {format_bytes(check['limit_bytes'])} and went on "
            f"with `{', '.join(limited['plan_at_end'])}` at "
            f"{format_bytes(limited['peak_allocated_bytes'])}; parameters "
            f"{check['parameters_of_change']:.0e} apart from those without a limit, over how far "
            "they went."
        )
    said = (check.get("error") or check.get("complaint") or "").strip().splitlines()
    code = f"exit code {check['exit_code']}" if "exit_code" in check else "failed"
    return f"{code}{': ' + said[-1] if said else ''}".rstrip(".") + "."
