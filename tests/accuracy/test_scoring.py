"""Predictions are scored against published readings: errors, fitted constants, verdicts, output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from accuracy import (
    cards,
    metrics,
    packages,
    peer_file,
    recorded,
    report,
    results,
    rows,
    scoring,
    table,
)

from memfit.allocator.settings import AllocatorSettings
from memfit.prediction.peak_range import PeakRange

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "score_accuracy.py"
pytestmark = pytest.mark.filterwarnings("default")  # optional packages warn of their own future


MLP = {
    "id": "one",
    "source": "somewhere",
    "device": "Tesla T4",
    "torch_version": "2.11.0+cu128",
    "precision": "fp32",
    "model": "mlp",
    "model_library": "custom",
    "constructor": {"layers": [["Linear", 1024, 1024], ["ReLU"], ["Linear", 1024, 8]]},
    "input": [
        {"name": "x", "shape": [64, 1024], "dtype": "float32"},
        {"name": "target", "shape": [64], "dtype": "int64"},
    ],
    "optimizer": "torch.optim.AdamW",
    "loss": "cross_entropy(model(x), target)",
    "steps": {"warmup": 1, "measured": 1},
    "measured": {"allocated_bytes": 1000, "reserved_bytes": 2000, "process_bytes": 2500},
}


def row_of(**changes):
    return rows.parse_row(MLP | changes)


def exactly(num_bytes: int) -> PeakRange:
    return PeakRange(likely_bytes=num_bytes, low_bytes=num_bytes, high_bytes=num_bytes)


def answer_of(row, allocated=1000, reserved=2000, smallest=None, card=10**6):
    predicted = scoring.Predicted(
        device="t4",
        allocated=exactly(allocated),
        reserved=exactly(reserved),
        smallest_bytes=smallest,
        context_bytes=77,
        card_bytes=card,
        seconds=0.0,
        notes=(),
    )
    return metrics.Answer(row=row, predicted=predicted)


# --- errors ----------------------------------------------------------------------------------------


def test_errors_are_summed_up_as_by_hand():
    answers = [
        answer_of(row_of(id=str(i)), allocated=allocated)
        for i, allocated in enumerate((1010, 980, 1000, 1040))
    ]
    found = metrics.summary("somewhere", "allocated", metrics.score_all(answers))

    assert found.rows == 4
    assert found.median_abs_error == pytest.approx(0.015)
    assert found.p95_abs_error == pytest.approx(0.04 - 0.15 * 0.02)
    assert found.worst_abs_error == pytest.approx(0.04)
    assert found.mean_signed_error == pytest.approx(0.0075)


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.0, 1.0), (0.5, 2.5), (0.95, 3.85), (1.0, 4.0)]
)
def test_a_percentile_lies_between_the_two_nearest_values(fraction, expected):
    assert metrics.percentile([3.0, 1.0, 4.0, 2.0], fraction) == pytest.approx(expected)


def test_what_was_not_measured_counts_nowhere():
    row = row_of(measured={"reserved_bytes": 2000})
    scores = metrics.score_all([answer_of(row), metrics.Answer(row=row, failure="it broke")])

    assert [each.quantity for each in metrics.summaries(scores)] == ["reserved"]
    assert metrics.summaries(scores)[0].rows == 1


def test_coverage_is_the_share_of_readings_inside_the_stated_interval():
    inside, outside = row_of(), row_of(id="two", measured={"allocated_bytes": 500})
    scores = metrics.score_all([answer_of(inside), answer_of(outside)])

    assert metrics.summary("somewhere", "allocated", scores).coverage == 0.5


# --- the constant for what lies outside the allocator -------------------------------------------------


def test_the_constant_is_the_median_over_other_models_of_the_same_kind():
    own = answer_of(row_of(measured={"process_bytes": 9000, "context_bytes": 7000}))
    others = [
        answer_of(row_of(id="a", model="a", measured={"context_bytes": 100})),
        answer_of(row_of(id="b", model="b", measured={"context_bytes": 300})),
        answer_of(row_of(id="c", model="c", measured={"process_bytes": 2900}), reserved=2000),
        answer_of(row_of(id="same", measured={"context_bytes": 9999})),
        answer_of(row_of(id="d", model="d", source="other", measured={"context_bytes": 9999})),
        answer_of(row_of(id="e", model="e", torch_version="2.12", measured={"context_bytes": 9})),
        answer_of(row_of(id="f", model="f", device="A10", measured={"context_bytes": 9999})),
        answer_of(row_of(id="g", model="g", measured={"allocated_bytes": 1})),
    ]

    assert metrics.fitted_context(own, [own, *others]) == (300, 3)
    score = metrics.score_all([own, *others])[0]
    assert score.figures["process"].predicted_bytes == 2300


def test_without_other_models_the_constant_is_the_catalogues():
    own = answer_of(row_of(measured={"process_bytes": 9000, "context_bytes": 7000}))
    assert metrics.fitted_context(own, [own]) == (77, 0)


def test_rows_scored_before_tell_the_context_where_a_file_has_no_other_model():
    own = answer_of(row_of(measured={"process_bytes": 9000, "context_bytes": 7000}))
    row = own.row

    def reading(num_bytes, **changes):
        known = {
            "id": "before",
            "source": row.source,
            "device": row.device,
            "torch_version": row.torch_version,
            "model": "another",
        }
        return metrics.ContextReading(**known | changes, num_bytes=num_bytes)

    known = [
        reading(500),
        reading(9999, model=row.model),
        reading(9999, source="other"),
        reading(9999, id=row.id),
    ]
    assert metrics.score_all([own], known)[0].context_bytes == 500


def test_a_row_that_could_not_be_predicted_still_tells_its_recorded_context():
    own = answer_of(row_of())
    read = metrics.Answer(
        row=row_of(id="a", model="a", measured={"context_bytes": 100}), failure="it broke"
    )
    unread = metrics.Answer(
        row=row_of(id="b", model="b", measured={"process_bytes": 5}), failure="it broke"
    )
    assert metrics.fitted_context(own, [own, read, unread]) == (100, 1)


# --- verdicts --------------------------------------------------------------------------------------


def verdicts_of(answer, kind):
    score = metrics.score_all([answer])[0]
    return {each.limit_bytes: each for each in score.verdicts if each.kind == kind}


def test_budgets_around_the_reading_are_judged_by_predicted_process_bytes():
    row = row_of(measured={"process_bytes": 10_000})
    found = verdicts_of(answer_of(row, reserved=10_700 - 77), "budget")

    assert {limit: each.fits for limit, each in found.items()} == {
        9000: False,
        9500: False,
        10_500: True,
        11_000: True,
    }
    assert [limit for limit, each in found.items() if each.is_wrong] == [10_500]
    assert found[10_500].is_uncertain


def test_a_verdict_far_from_the_interval_is_certain():
    row = row_of(measured={"process_bytes": 10_000})
    found = verdicts_of(answer_of(row, reserved=30_000), "budget")

    count = metrics.count_verdicts(
        metrics.score_all([answer_of(row, reserved=30_000)]), ("budget",)
    )
    assert not any(each.is_uncertain for each in found.values())
    assert (count.all, count.wrong, count.uncertain, count.wrong_and_certain) == (4, 2, 0, 2)
    assert count.wrong_fraction == 0.5
    assert count.wrongly_fits == 0


def test_caps_are_judged_by_the_least_memory_that_survives():
    caps = [{"cap_fraction": 0.5, "oom": True}, {"cap_fraction": 0.8, "oom": False}]
    row = row_of(measured_extra={"cap_tests": caps})
    found = verdicts_of(answer_of(row, reserved=900, smallest=700, card=1000), "cap")

    assert (found[500].says_fits, found[500].is_wrong) == (False, False)
    assert (found[800].says_fits, found[800].is_wrong) == (True, False)


@pytest.mark.parametrize(("smallest", "is_wrong"), [(900, True), (1000, False)])
def test_a_run_that_failed_needs_more_than_the_card_has(smallest, is_wrong):
    row = row_of(outcome="oom", measured={"context_bytes": 5})
    (verdict,) = verdicts_of(
        answer_of(row, reserved=1200, smallest=smallest, card=1000), "oom"
    ).values()
    assert verdict.is_wrong == is_wrong


# --- cards and settings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "total_bytes", "expected"),
    [
        ("Tesla T4", None, "t4"),
        ("T4", None, "t4"),
        ("RTX 3090", None, "rtx-3090"),
        ("RTX 3060", 8 << 30, "rtx-3060-8gb"),
        ("NVIDIA GeForce RTX 3060", 12622168064, "rtx-3060-12gb"),
        ("NVIDIA H200", None, "h200"),
    ],
)
def test_a_card_is_known_by_the_names_that_people_give_it(name, total_bytes, expected):
    row = row_of(device=name, device_total_bytes=total_bytes)
    assert cards.card_of_row(row).name == expected


@pytest.mark.parametrize(
    ("name", "total_bytes"),
    [("Voodoo 2", None), (None, None), ("RTX 3060", 4 << 30), ("RTX 3060", None)],
)
def test_an_unknown_card_or_one_of_several_is_refused(name, total_bytes):
    row = row_of(device=name, device_total_bytes=total_bytes)
    with pytest.raises(packages.CannotRebuild, match=r"device|catalogue"):
        cards.card_of_row(row)


@pytest.mark.parametrize(
    "extra",
    [
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        {"allocator": {"expandable_segments": True}},
        {"expandable_segments": True},
    ],
)
def test_a_recorded_setting_of_the_allocator_is_honoured(extra):
    assert scoring.settings_of(row_of(measured_extra=extra)).expandable_segments
    assert not scoring.settings_of(row_of()).expandable_segments


# --- output ----------------------------------------------------------------------------------------


def test_json_lines_have_one_object_per_source_and_quantity():
    scores = metrics.score_all([answer_of(row_of()), answer_of(row_of(source="other"))])
    found = [json.loads(line) for line in table.json_lines(scores)]

    assert [(each["source"], each["quantity"]) for each in found] == [
        (source, quantity)
        for source in ("somewhere", "other")
        for quantity in ("allocated", "reserved", "process")
    ]
    assert list(found[0]) == [
        "source",
        "quantity",
        "rows",
        "median_abs_error",
        "p95_abs_error",
        "worst_abs_error",
        "mean_signed_error",
    ]


def test_the_page_shows_every_row_failures_included():
    answers = [
        answer_of(row_of()),
        metrics.Answer(row=row_of(id="two"), failure="it\nbroke"),
        answer_of(row_of(id="three", outcome="oom", measured={"context_bytes": 5}), smallest=900),
    ]
    gpu = json.loads(json.dumps(results.as_json(metrics.score_all(answers))))
    peer = {
        "tool": "other tool",
        "version": "1",
        "date": "2026-11-21",
        "quantity": "allocated",
        "command": "ask it",
        "figures": {"one": 1500, "two": "not applicable: why"},
    }
    page = report.page(gpu | {"date": "2026-11-21", "torch": "2"}, None, [peer])

    assert "| `one` | mlp, fp32, AdamW, batch None | 2.4 KiB | +0.00 % |" in page
    assert "+50.00 % |" in page
    assert "- `two`: it broke" in page
    assert "| `three` " in page
    assert "out of memory" in page
    assert "not applicable: why" in page


def test_the_stored_page_is_what_its_figures_give():
    stored = (ROOT / "docs" / "accuracy.md").read_text("utf-8")
    figures = [
        json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))
        for name in ("accuracy_gpu", "accuracy", "accuracy_blind", "workspaces")
    ]
    *figures, blind, workspaces = figures
    assert stored == report.page(*figures, peer_file.read_peers(), blind, workspaces)


def test_recorded_rows_are_summed_up_apart_by_half_with_the_blind_errors_beside_them():
    rows = [
        row_of(id=f"card-{split}", split=split, source=results.RECORDED)
        for split in recorded.SPLITS
    ]
    answers = [answer_of(row_of()), *(answer_of(row) for row in rows)]
    gpu = json.loads(json.dumps(results.as_json(metrics.score_all(answers))))
    assert [each["rows"] for each in gpu["overall"]] == [1, 1, 1]

    gpu |= {"date": "2026-11-27", "torch": "2"}
    first, second = gpu["rows"][1:]
    days = ("2026-11-25", "Tesla T4"), ("2026-11-26", "Tesla T4"), ("2026-11-26", "NVIDIA A10")
    blind = {
        "rows": [
            row | {"blind_on": day, "device": card}
            for row, (day, card) in zip((first, second, second), days, strict=True)
        ]
    }
    text = "\n".join(recorded.recorded_section(gpu, blind))
    assert text.count("| all | allocated | 1 |") == 3
    places = [text.index(f"Blind ({day}, {card})") for day, card in days]
    assert places == sorted(places)
    assert text.count("| development | allocated | 1 |") == 1
    assert text.count("| held-out | allocated | 1 |") == 1
    assert "| `card-held-out` | held-out | +0.00 % | +0.00 % |" in text


def test_the_allocator_s_setting_is_read_where_a_recording_wrote_it():
    extra = {"allocator_name": "split", "allocator_setting": "max_split_size_mb:128"}
    settings = scoring.settings_of(row_of(measured_extra=extra))
    assert settings == AllocatorSettings.parse("max_split_size_mb:128")


# --- the command -----------------------------------------------------------------------------------


def scored(*words: str):
    """Run the command on its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
def test_rows_of_an_unknown_source_are_scored_and_a_broken_one_ends_nothing(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [
        MLP | {"unheard_of": {"a": 1}},
        MLP | {"id": "unknown card", "device": "Voodoo 2"},
        MLP | {"id": "no loss", "loss": None, "source": "third"},
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    ran = scored(str(path), "--jobs", "1", "--json-out", str(tmp_path / "all.json"))

    assert ran.returncode == 0, ran.stderr
    last = [json.loads(line) for line in ran.stdout.splitlines()[-6:]]
    assert [(each["source"], each["rows"]) for each in last] == [("somewhere", 1)] * 3 + [
        ("third", 0)
    ] * 3
    assert last[3]["median_abs_error"] is None
    assert "unknown card: The row cannot be rebuilt: the device 'Voodoo 2'" in ran.stdout
    assert "no loss: " in ran.stdout
    assert "| allocated, median at most 1.00 % |" in ran.stdout
    assert "| verdicts, at most 2.00 % wrong |" in ran.stdout
    assert len(json.loads((tmp_path / "all.json").read_text())["rows"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "words", "said"),
    [
        (json.dumps(MLP) + "\n{broken", (), "line 2"),
        ("", (), "no rows"),
        (json.dumps(MLP), ("--only", "nobody"), "no row nobody"),
    ],
)
def test_a_file_that_cannot_be_scored_is_one_message_and_exit_code_2(
    tmp_path, content, words, said
):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    ran = scored(str(path), *words)

    assert ran.returncode == 2
    assert ran.stdout == ""
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr


# --- how close it is -----------------------------------------------------------------------------------

GATE = {
    "torch-preflight-0": "transformers",
    "torch-preflight-6": "torchvision",
    "fitcheck-t4-phase3-2026-09-16-07": "peft",
    "fitcheck-final-cb26baa4af47": "bitsandbytes",
    "fitcheck-final-d96e79e25a7c": "peft",
    "fitcheck-final-feca394ad10d": "bitsandbytes",
}
MEASURED = {
    row.id: row
    for file in sorted((ROOT / "benchmarks" / "accuracy" / "rows").glob("*.jsonl"))
    for row in rows.read_rows(file)
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "package"), GATE.items())
def test_allocated_bytes_are_predicted_within_a_hundredth_of_the_reading(name, package):
    for needed in ("transformers", package):
        try:
            packages.load_package(needed)
        except packages.CannotRebuild:
            pytest.skip(f"{needed} is not installed")
    row = MEASURED[name]
    found = scoring.predict_row(row).allocated.likely_bytes

    assert abs(found / row.measured.allocated_bytes - 1) < 0.01
