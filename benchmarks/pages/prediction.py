"""Sections on predictions, and README's figures."""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from collections.abc import Iterator, Sequence

from accuracy.recorded import read_alike
from accuracy.results import RECORDED
from results_file import load_result

from memfit.units import format_bytes, format_fraction

from .blocks import Figures, table


def accuracy(figures: Figures) -> Iterator[str]:
    """Say how far predicted peaks are from measured ones."""
    yield (
        f"{figures['num_rows']} rows: median absolute error "
        f"{figures['median_abs_error_fraction']:.4%}, 95th percentile "
        f"{figures['p95_abs_error_fraction']:.3%}, worst "
        f"{figures['worst_abs_error_fraction']:.3%}. All rows: [accuracy.md](accuracy.md)."
    )
    on_cards = load_result("accuracy_gpu")
    parts = (
        f"{each['quantity']} {each['median_abs_error']:.2%} (worst {each['worst_abs_error']:.1%}, "
        f"{each['rows']} rows)"
        for each in on_cards["overall"]
    )
    yield (
        "Against peaks that other people read on real GPUs (`make accuracy`, "
        f"{on_cards['date']}), median absolute error: {', '.join(parts)}."
    )


def same_bytes(figures: Figures) -> Iterator[str]:
    """Say whether two commits predict the same."""
    yield (
        f"Between the commits {figures['before']} and {figures['after']} code was moved and "
        "joined, and nothing was to change."
    )
    rows = {"cpu": "CPU, predicted and measured here", "gpu": "GPUs, with both ends of intervals"}
    yield table(
        "rows | number | other bytes",
        "lrl",
        (
            (words, figures[place]["num_rows"], "; ".join(figures[place]["differing"]) or "none")
            for place, words in rows.items()
        ),
    )
    failing = [name for name, sides in figures["cpu"]["table"].items() if "fails" in sides[0]]
    if failing:
        yield f"On this processor {len(failing)} rows run on neither side: {'; '.join(failing)}."


def large_model(figures: Figures) -> Iterator[str]:
    """Say how long large models take to predict."""
    rows, length = figures["bert_batch"]
    yield (
        f"A decoder of {figures['num_parameters'] / 1e9:.2f} billion parameters in "
        f"{figures['num_layers']} layers, all of them trained in bfloat16 with AdamW on "
        f"{figures['num_tokens']} tokens, on a virtual {figures['device']}: predicted in "
        f"{figures['predict_seconds']:.1f} s (imports take "
        f"{figures['import_seconds']:.1f} s more), in "
        f"{format_bytes(figures['resident_peak_bytes'])} of memory. Peak allocated "
        f"{format_bytes(figures['predicted_peak_bytes'])}, process "
        f"{format_bytes(figures['predicted_process_bytes'])}."
    )
    yield (
        f"BERT-base, {rows} sequences of {length} tokens, fp32, AdamW, on a virtual "
        f"{figures['bert_device']}: {figures['bert_predict_seconds']:.1f} s."
    )


def allocator(figures: Figures) -> Iterator[str]:
    """Say how fast the simulated allocator is."""
    yield (
        f"{figures['num_events']:,} events of a step like a transformer's: "
        f"{figures['events_per_second']:,} events a second with the default settings. The "
        f"least memory in which {figures['smallest_capacity_num_events']:,} events survive is "
        f"found in {figures['smallest_capacity_seconds']:.2f} s."
    )


def conve(figures: Figures) -> Iterator[str]:
    """Say what ConvE takes within a budget, and how well it ranks."""
    test = figures["test"]
    yield (
        f"As it is: {format_bytes(figures['plain_peak_bytes'])}. Budget, three quarters of it: "
        f"{format_bytes(figures['budget_bytes'])}. Plan: {' + '.join(figures['strategies'])}, "
        f"{figures['numerics']}."
    )
    yield (
        f"Predicted {format_bytes(figures['predicted_peak_bytes'])}, measured over the whole "
        f"training {format_bytes(figures['measured_peak_bytes'])} "
        f"({format_fraction(figures['error_fraction'])}; the prediction is for the largest "
        "batch there is)."
    )
    yield (
        f"Filtered test ranking, both sides: MRR {test['mrr']:.3f}, hits@1 "
        f"{test['hits_at_1']:.3f}, hits@10 {test['hits_at_10']:.3f}. The published row is MRR "
        "0.94 (README of TimDettmers/ConvE). The flags were chosen in short scans that showed "
        "validation and test rankings alike, so the figure is not blind to the test triples."
    )
    yield f"Whole process: {figures['whole_process_seconds']:.0f} s."


def startup(figures: Figures) -> Iterator[str]:
    """Say how fast the command starts."""
    torch = "imports torch" if figures["imports_torch"] else "does not import torch"
    yield (
        f"`memfit --help`: median {figures['help_median_seconds']:.2f} s, longest "
        f"{figures['help_longest_seconds']:.2f} s; {torch}."
    )


def page_sizes(figures: Figures) -> Iterator[str]:
    """Say how large pages are, and how long they take to open and to write."""
    yield (
        "A job of three modules and one of two thousand (`benchmarks/page_jobs.py`); a run of 200 "
        f"steps and one of 3. Of each page with charts {figures['scripts_kilobytes']:,} kB are the "
        "scripts. Opened in Chromium without a GPU, until the charts are drawn."
    )
    yield table(
        "page | job | kB | seconds to open",
        "llrr",
        (
            (
                row["page"],
                row["job"],
                f"{row['kilobytes']:,}",
                "-" if row["open_seconds"] is None else f"{row['open_seconds']:.2f}",
            )
            for row in figures["rows"]
        ),
    )
    yield "What `memfit report` takes for the journal of a very long run, start-up included:"
    yield table(
        "steps | events | processor seconds | kB",
        "rrrr",
        (
            (
                f"{row['num_steps']:,}",
                f"{row['num_events']:,}",
                f"{row['processor_seconds']:.1f}",
                f"{row['kilobytes']:,}",
            )
            for row in figures["long_runs"]
        ),
    )


def readme_figures() -> str:
    """Return the paragraphs of README that name figures."""
    return "\n\n".join(
        map(_filled, (_on_the_cpu(), _on_cards(), _blind_on_a_card(), _large_on_a_card()))
    )


def _on_the_cpu() -> str:
    figures = load_result("accuracy")
    return (
        "On the CPU, the predicted peak of one step against the allocator's own events, over nine "
        "architectures (transformers, convolutional networks, an LSTM), two optimizers and four "
        f"settings: median error {figures['median_abs_error_fraction']:.3%}, worst "
        f"{figures['worst_abs_error_fraction']:.3%}, {figures['num_exact_to_the_byte']} of the "
        f"{figures['num_rows']} rows equal to the byte{_without_amx(figures)}. All rows are in "
        "[docs/accuracy.md](docs/accuracy.md), all other figures in "
        "[docs/benchmarks.md](docs/benchmarks.md)."
    )


def _without_amx(figures: Figures) -> str:
    if figures.get("onednn_max_cpu_isa") is None:
        return ""
    return ", without oneDNN's kernels for AMX, with which rows in bf16 are up to 1.1% low"


def _on_cards() -> str:
    figures, large = load_result("accuracy_gpu"), load_result("large_model")
    of = {each["quantity"]: each for each in figures["overall"]}
    complete = sum(
        not row.get("is_collected") and row["source"] != RECORDED for row in figures["rows"]
    )
    return (
        "On GPUs, against peaks that other people read on real cards "
        f"({complete} training configurations), nothing run and no GPU at hand: peak "
        f"allocated median {of['allocated']['median_abs_error']:.2%}, worst "
        f"{of['allocated']['worst_abs_error']:.1%}; reserved median "
        f"{of['reserved']['median_abs_error']:.1%}, one row in twenty beyond "
        f"{of['reserved']['p95_abs_error']:.1%}; process bytes median "
        f"{of['process']['median_abs_error']:.1%}. `make accuracy` scores any file of such "
        f"readings. A decoder of {large['num_parameters'] / 1e9:.0f} billion parameters is "
        f"predicted in {large['predict_seconds']} s with "
        f"{format_bytes(large['resident_peak_bytes'])} of memory."
    )


def _blind_on_a_card() -> str:
    every = load_result("accuracy_blind")["rows"]
    seen = [row for row in every if row["device"] == "NVIDIA H200"]
    last_day = max(row["blind_on"] for row in seen)
    known = [row["figures"] for row in seen if row["blind_on"] == last_day]
    num_both, num_alike = read_alike(
        [row for row in load_result("accuracy_gpu")["rows"] if row["source"] == RECORDED],
        "allocated",
    )
    num_held, num_plans = _held_plans("card_checks")
    others_held, num_others = _held_plans("card_checks_h100")
    return (
        f"{len(known)} steps on an H200 were predicted before they ran, by rules that other steps "
        f"had led to: {_sizes(known, 'allocated')}; {_sizes(known, 'process')}. There {num_held} "
        f"of {num_plans} plans for 70% and 45% of a step's memory stayed inside their budget. An "
        f"H100, which memfit had not seen, allocated as many bytes as the H200 in {num_alike} of "
        f"{num_both} steps. There {others_held} of {num_others} plans stayed inside: the context "
        "of the process had been a guess, 242 to 262 MiB too low, and the others had been called "
        "uncertain; it is in the catalogue now, and `memfit calibrate` reads yours. "
        "[All of them](docs/accuracy.md#recorded-on-a-card-for-this), and the plans "
        "[there](docs/benchmarks.md#plans-on-a-card) and "
        "[there](docs/benchmarks.md#plans-on-another-card)."
    )


def _large_on_a_card() -> str:
    cases = load_result("large_card")["cases"]

    def worst(quantity: str) -> float:
        return max(abs(e["predicted"][quantity] / e["measured"][quantity] - 1) for e in cases)

    off_bytes = max(
        abs(e["predicted"]["peak_allocated_bytes"] - e["measured"]["peak_allocated_bytes"])
        for e in cases
    )
    budgets = ", ".join(str(e["budget"]).replace("GiB", "") for e in cases if e["budget"])
    return (
        f"Plans for that decoder, made without a card for {budgets} GiB and all of an H200, were "
        f"run on one: their peaks were as predicted to {format_bytes(off_bytes)}, the process's "
        f"bytes to {worst('process_bytes'):.2%}, seconds to {worst('step_seconds'):.0%}, and the "
        "same losses. [All four](docs/benchmarks.md#a-large-model-under-its-plans-on-a-card)."
    )


def _sizes(asked: Sequence[Figures], quantity: str) -> str:
    sizes = sorted(abs(each[quantity]["error"]) for each in asked)
    last, worst = sizes[math.ceil(0.95 * len(sizes)) - 1], sizes[-1]
    title = "process bytes" if quantity == "process" else f"peak {quantity}"
    return (
        f"{title} median {statistics.median(sizes):.2%}, one in twenty beyond {last:.1%}, worst "
        f"{worst:.0%}"
    )


def _held_plans(name: str) -> tuple[int, int]:
    """Return how many plans stayed inside their budgets, and how many were measured."""
    cases = [each for each in load_result(name)["cases"] if each["measured"]]
    bounded = [each for each in cases if each["budget_bytes"]]
    held = [e for e in bounded if e["measured"]["process_bytes"] <= e["budget_bytes"]]
    return len(held), len(bounded)


def _filled(paragraph: str) -> str:
    paragraph = re.sub(r"(\d)%", r"\1 %", paragraph)
    return textwrap.fill(paragraph, 100, break_long_words=False, break_on_hyphens=False)
