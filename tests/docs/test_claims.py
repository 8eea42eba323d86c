"""Figures in the middle of sentences are those of the stored results.

What the benchmarks write themselves is held by `test_benchmark_page.py`. A claim here is a piece of
a page with the figures that belong in it; where a benchmark has run again, the page has to follow.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from results_file import load_result

from memfit.units import format_bytes, format_seconds

ROOT = Path(__file__).parents[2]


def percent(fraction: float) -> str:
    return f"{fraction:.1%}".replace("%", " %")


def of_conve() -> Iterator[str]:
    figures = load_result("conve")
    yield f"| plain step, predicted | {format_bytes(figures['plain_peak_bytes'])} |"
    yield f"| budget, three quarters of it | {format_bytes(figures['budget_bytes'])} |"
    yield f"| plan, predicted | {format_bytes(figures['predicted_peak_bytes'])} |"
    yield f"| plan, measured | {format_bytes(figures['measured_peak_bytes'])} "
    plain_seconds, seconds = figures["plain_step_seconds"], figures["predicted_step_seconds"]
    yield f"| step as it is, predicted | {format_seconds(plain_seconds)} |"
    change = 100 * (seconds / plain_seconds - 1)
    yield f"| step under the plan, predicted | {format_seconds(seconds)} ({change:+.0f} %) |"
    yield f"| filtered test MRR, both sides | about {figures['test']['mrr']:.2f} |"


def of_the_guard() -> Iterator[str]:
    short, middle, _ = load_result("guard_overhead")["rows"]
    bare_seconds, share = short["bare_step_seconds"], short["guard_share"]
    shares = short["guard_shares_of_rounds"]
    yield (
        f"takes {1e3 * bare_seconds * share:.1f} ms of a step of {1e3 * bare_seconds:.0f} ms (what "
        "the job's code can reach, random states, the batch on disk): "
        f"{percent(share)}, {100 * min(shares):.1f} to {percent(max(shares))} in single rounds"
    )
    yield f"two bare loops differ by {100 * abs(short['ratio_of_two_bare_loops'] - 1):.0f} %"
    yield (
        f"Of steps of {1e3 * middle['bare_step_seconds']:.0f} ms it takes "
        f"{percent(middle['guard_share'])}"
    )
    added = short["ratio_of_sums"] - 1
    yield (
        f"it is {1e3 * bare_seconds * added:.1f} ms, {percent(added)} of steps of "
        f"{1e3 * bare_seconds:.0f} ms"
    )


def of_watching() -> Iterator[str]:
    figures = load_result("watch_overhead")
    yield (
        f"of steps of {1e3 * figures['bare_step_seconds']:.0f} ms with a data loader, the hooks "
        f"take {percent(figures['fraction_in_hooks'])} of the time; steps with and without them, "
        f"in turns, differ by {percent(figures['median_ratio_of_blocks'] - 1)} in the median"
    )
    yield (
        f"Attaching takes {figures['attach_seconds']:.2f} s, once, when torch is imported, and the "
        f"first steps {figures['first_steps_extra_seconds']:.1f} s together"
    )


def of_cards() -> Iterator[str]:
    figures = load_result("accuracy_gpu")["overall"]
    allocated = next(each for each in figures if each["quantity"] == "allocated")
    yield (
        f"On all {allocated['rows']} public readings of a T4 that it was compared with, peak "
        f"allocated is within {percent(allocated['worst_abs_error'])}"
    )


def of_times() -> Iterator[str]:
    devices = load_result("operator_times")["devices"]
    num_steps, between = _of_card(devices["h200"])
    num_others, between_others = _of_card(devices["h100-80gb"])
    here = [step["estimate_of_measured"] for step in devices["cpu"]["steps"]]
    yield (
        f"On {num_steps} steps that were measured on that H200 the estimates are {between} of the "
        f"measured seconds, on {num_others} on an H100, which nothing was fitted to, "
        f"{between_others}, on {len(here)} on the processor between {min(here):.2f} and "
        f"{max(here):.2f}"
    )


def _of_card(device: dict[str, Any]) -> tuple[int, str]:
    """Count the steps of a card, of both kinds, and say how far their estimates are off."""
    on_card, others = device["steps"], device["recorded_steps"]
    ratios = [step["estimate_of_measured"] for step in on_card]
    ratios += [others["estimate"]["least"], others["estimate"]["most"]]
    return len(on_card) + others["num_steps"], f"between {min(ratios):.2f} and {max(ratios):.2f}"


def of_exactness() -> Iterator[str]:
    figures, programs = load_result("exactness"), load_result("random_programs")
    halves = blind, public = figures["blind"], figures["public"]

    def both(name: str) -> int:
        return sum(half[name] for half in halves)

    proved = [
        row["verdict"] == "proved"
        for row in figures["rows"]
        if row["true_class"] != "different" and not row["reads_values"]
    ]
    yield (
        f"- **{both('num_cases')} losses and models of practice**, {blind['num_cases']} written "
        "before the analysis and without looking at public code, "
        f"{public['num_cases']} after public repositories."
    )
    yield (
        f"{both('num_kept_proved')} of {both('num_kept')} are proved ({sum(proved)} of the "
        f"{len(proved)} that look at no values); {both('num_kept_not_known')} are not known"
    )
    assert not any(half["false"] or half["broken"] for half in halves), "none is called exact"
    assert len(public["too_timid"]) == 3, "three are refused though they need not be"
    yield f"- **{programs['num_programs']:,} random programs**"
    yield f"{programs['same_proved']:,} proved, none of them wrongly"
    assert not programs["false"]


def of_leaks() -> Iterator[str]:
    rows = {
        "first run, nothing changed": load_result("leaks_heldout")["first_run"],
        "after all fixes": load_result("leaks_heldout")["after_fixes"],
    }
    for name, found in rows.items():
        yield (
            f"| {name} | {found['num_named']} of {found['num_leaks']} | {found['num_lines_right']} "
            f"| {found['num_false_alarms']} of {found['num_clean']} | "
            f"{len(found['told_besides'])} |"
        )


def of_jobs() -> Iterator[str]:
    for row in load_result("jobs")["rows"]:
        expected_bytes = row["script_first_step_bytes"] - row["script_other_bytes"]
        first = (
            f"| `{row['script']}` | {row['lines_edited']} | {expected_bytes:,} | "
            f"{row['first_step_peak_bytes']:,} |"
        )
        if "measured_peak_bytes" not in row:
            yield first
            continue
        yield (
            f"{first} {100 * row['budget_share']:.0f} % of {row['steady_step_peak_bytes']:,} | "
            f"{row['predicted_peak_bytes']:,} | {row['measured_peak_bytes']:,} | "
            f"{row['numerics'] if row['verified'] else 'not kept'} |"
        )


def of_dreams() -> Iterator[str]:
    found = {row["run"]: row["metrics"] for row in load_result("dreams_learning")["rows"]}

    def spread(run: str, name: str) -> str:
        return f"{found[run][f'{name}_mean']:.3f} +- {found[run][f'{name}_std']:.3f}"

    ions = found["bsa_group"]
    yield (
        f"the same with whole ions held out, `--split_by group` | {percent(ions['val_mask_top1'])}"
        f" | {percent(ions['frequency_top1'])}"
    )
    yield (
        f"the same with whole ions held out | {ions['val_order_accuracy']:.3f} | "
        f"{ions['logistic_order_accuracy']:.3f}"
    )
    for element in ("F", "Cl"):
        pre_trained, random = f"has_{element}_pre_trained", f"has_{element}_random"
        yield (
            f"| has_{element}, AUROC | {spread(pre_trained, 'auroc')} | {spread(random, 'auroc')} "
            f"| {spread(pre_trained, 'logistic_auroc')} | |"
        )
        yield (
            f"| has_{element}, accuracy | {spread(pre_trained, 'accuracy')} | "
            f"{spread(random, 'accuracy')} | {spread(pre_trained, 'logistic_accuracy')} | "
            f"{spread(pre_trained, 'majority_accuracy')} |"
        )
    tuned = "has_F_pre_trained_tuned"
    yield (
        f"| has_F fine-tuned, AUROC | {spread(tuned, 'auroc')} | "
        f"{spread('has_F_random_tuned', 'auroc')} | {spread(tuned, 'logistic_auroc')} | |"
    )


def of_deepspeed() -> Iterator[str]:
    found = load_result("deepspeed")
    errors = [row["error_fraction"] for row in found["peaks"]]
    beside, after = max(errors[:8], key=abs), max(errors[8:], key=abs)
    yield f"are at most {found['worst_difference']:.1e} off"
    yield f"{found['num_inside_intervals']} of {len(errors)} steps lie inside the interval"
    yield f"the figure itself is off by {percent(found['worst_error_fraction'])} at worst"
    yield f"written beside it is off by {percent(beside)} at worst"
    yield f"measured once afterwards, by {percent(after)}"


CLAIMS = {
    "docs/deepspeed.md": of_deepspeed,
    "README.md": of_conve,
    "docs/guarded-runs.md": of_the_guard,
    "docs/run-command.md": of_watching,
    "docs/how-prediction-works.md": of_cards,
    "docs/exactness.md": of_exactness,
    "docs/how-planning-works.md": of_times,
    "docs/leaks.md": of_leaks,
    "docs/scripts.md": of_jobs,
    "src/memfit_workloads/dreams/README.md": of_dreams,
}


@pytest.mark.parametrize("page", CLAIMS)
def test_a_page_claims_what_was_measured(page: str) -> None:
    text = " ".join((ROOT / page).read_text("utf-8").split())

    assert [claim for claim in CLAIMS[page]() if claim not in text] == []
