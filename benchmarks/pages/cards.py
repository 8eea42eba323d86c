"""The section on what was checked on a card."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.units import format_bytes, format_fraction

from .blocks import Figures, table

_WHY_NOT = {
    "AttributeError": "allocator settings asked for what torch 2.11 lacks; put right since",
    "no result": "the time on the card was over before its turn",
}


def card_checks(figures: Figures) -> Iterator[str]:
    """Show every case that was measured on the card, and name the others."""
    cases = figures["cases"]
    measured = [case for case in cases if case["measured"]]
    yield (
        f"On an {figures['card']}, cuDNN {figures['cudnn']}, transformers "
        f"{figures['transformers']}, in two runs of commit {figures['revision']}. Predictions are "
        "those of that commit, from before anything of it was compared with a card; "
        "[accuracy.md](accuracy.md#recorded-on-a-card-for-this) says what has changed since."
    )
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
    yield _apart(case["same"]["with_plan"])
    yield _apart(case["same"]["plain_again"])


def _apart(found: Figures) -> str:
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
        parts.append(
            f"The others were passed by up to {format_bytes(most)}: the CUDA context had been "
            "guessed at 500 MiB and took 742 to 758 MiB."
        )
    return " ".join(parts)


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
