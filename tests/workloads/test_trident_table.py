"""The table of the document's variants: recorded, computed, and what follows from it."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from results_file import load_result
from rich.console import Console
from tests.workloads.training import train_workload

import memfit
from memfit.devices.spec import CPU, CUDA
from memfit.errors import DataError, RecordingError, UsageError
from memfit.kernels.cpu_onednn_3_12.convolutions import has_avx512
from memfit.runtime.run import open_plain_session
from memfit.session.batches import find_layout
from memfit_workloads.trident.benchmark_table import figures, show
from memfit_workloads.trident.benchmark_table.figures import (
    CardFigures,
    CpuFigures,
    RowFigures,
    with_card,
)
from memfit_workloads.trident.benchmark_table.findings import findings_of, sentences
from memfit_workloads.trident.benchmark_table.rows import (
    ALL_STATES,
    BASELINE,
    BF16,
    CHECKPOINTED,
    CPU_SIZES,
    EIGHT_BIT,
    OFFLOAD,
    ROWS,
    Place,
)
from memfit_workloads.trident.benchmark_table.show import PATH, recorded_table
from memfit_workloads.trident.four_bit import four_bit_base
from memfit_workloads.trident.job import StepSettings, build_job
from memfit_workloads.trident.sizes import DEMO, DOCUMENT

WIDTH = 100
BY_NAME = {row.name: row for row in ROWS}


@pytest.fixture(scope="module")
def recorded() -> dict[str, RowFigures]:
    return {row.name: row for row in recorded_table().rows}


def a_card(peak_bytes: int, **values: object) -> CardFigures:
    made = CardFigures(
        strategies=(), numerics="exact", certainty="table", peak_allocated_bytes=peak_bytes,
        low_bytes=peak_bytes, high_bytes=peak_bytes, process_bytes=peak_bytes, fits=False,
        sample_seconds=1.0, host_bytes=0, kept_bytes=peak_bytes,
        by_category={"parameters": 7, "optimizer state": 14}, by_branch={"rgb.video": peak_bytes, "infrared": 0},
    )  # fmt: skip
    return replace(made, **values)


def shown_of(words: tuple[str, ...]) -> tuple[dict[str, object], str]:
    console = Console(width=2 * WIDTH, record=True, file=io.StringIO())
    result = train_workload("trident", words, console)
    return result, console.export_text()


def test_the_recorded_rows_are_those_of_the_code(recorded):
    assert list(recorded) == [row.name for row in ROWS]
    for row in ROWS:
        found = recorded[row.name]
        assert (found.title, found.claim) == (row.title, row.claim)
        assert found.batch_size == row.batch_size


@pytest.mark.slow  # bitsandbytes and PEFT are imported
def test_the_recorded_rows_have_the_plans_of_the_code(recorded):
    for row in ROWS:
        found = recorded[row.name]
        for part, kind, sizes in ((found.card, CUDA, DOCUMENT), (found.cpu, CPU, CPU_SIZES)):
            place = Place(device_kind=kind, sizes=sizes)
            assert part.strategies == memfit.Plan(strategies=row.strategies(place)).labels()


def test_the_package_has_the_figures_of_the_benchmark():
    content = load_result("trident_table")
    assert {name: content[name] for name in ("date", "torch", "memfit", "rows")} == {
        name: value for name, value in json.loads(PATH.read_text()).items() if name in content
        and name != "num_threads"
    }  # fmt: skip


def test_predictions_are_within_a_hundredth_of_what_was_measured(recorded):
    assert max(abs(row.cpu.error_fraction) for row in recorded.values()) < 0.01


@pytest.mark.slow
def test_what_is_recorded_at_the_document_s_size_is_what_is_predicted_now(recorded):
    row = BY_NAME[CHECKPOINTED]
    found, before = with_card(RowFigures.of(row), row).card, recorded[row.name].card
    assert found.sample_seconds == pytest.approx(before.sample_seconds, rel=1e-4)
    assert replace(found, sample_seconds=before.sample_seconds) == before


IN_HALF = pytest.param(
    BF16,
    marks=pytest.mark.skipif(has_avx512(), reason="the table was computed with AVX2, in bf16"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", [BASELINE, IN_HALF])
def test_what_is_recorded_at_the_small_size_is_what_is_predicted_now(recorded, name):
    row = BY_NAME[name]
    plan = memfit.Plan(strategies=row.strategies(Place(device_kind=CPU, sizes=CPU_SIZES)))
    job = build_job(CPU_SIZES, StepSettings(batch_size=1))
    found = memfit.predict(job, plan=plan).peak_allocated_bytes
    assert found == recorded[name].cpu.predicted_peak_bytes


def test_findings_are_computed_of_the_rows(recorded):
    assert findings_of(list(recorded.values())[:5]) is None
    cards = {name: a_card(1000) for name in recorded}
    cards |= {EIGHT_BIT: a_card(990), OFFLOAD: a_card(985), ALL_STATES: a_card(980)}
    cards |= {CHECKPOINTED: a_card(600), BF16: a_card(800, kept_bytes=750)}
    rows = [replace(row, card=cards[name], cpu=None) for name, row in recorded.items()]
    found = findings_of(rows)
    assert found.saved_bytes[ALL_STATES] == 20
    assert found.removing == [CHECKPOINTED, BF16]
    assert found.kept_fraction_under_bf16 == 0.75
    assert found.fitting == ()
    said = " ".join(sentences(rows))
    assert "2.0 % of the peak" in said
    assert "0 of the document's 5 rows fit" in said


def test_the_table_says_claims_figures_and_its_date_in_a_hundred_columns(recorded):
    result, text = shown_of(("--table",))
    assert max(map(len, text.splitlines())) <= WIDTH
    origin = recorded_table().origin
    assert f"Recorded on {origin.date} with memfit" in text
    for row in recorded.values():
        assert row.title in text
    assert "45-50" in text
    assert len(result["rows"]) == len(ROWS)
    assert 3 <= len(result["sentences"]) <= 6
    assert result["plain_peak_bytes"] == recorded[BASELINE].card.peak_allocated_bytes
    json.dumps(result)


def test_a_narrow_terminal_loses_nothing_of_it():
    console = Console(width=80, record=True, file=io.StringIO())
    train_workload("trident", ("--table",), console)
    text = console.export_text()
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    "words", [("--synthetic",), ("--height", "64"), ("--demo",), ("--allow", "bf16")]
)
def test_flags_of_a_training_run_are_refused_beside_it(words):
    with pytest.raises(UsageError, match=f"so {words[0]} does"):
        train_workload("trident", ("--table", *words))


def test_a_file_of_flags_is_refused_beside_it_and_cannot_ask_for_it(tmp_path):
    (path := tmp_path / "tasks.yml").write_text("table: live\n")
    with pytest.raises(UsageError, match="so --config does nothing"):
        train_workload("trident", ("--config", path))


def test_a_row_that_cannot_be_predicted_says_why(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise RecordingError("the step reads a clock", "Do without.")

    monkeypatch.setattr(figures.memfit, "predict", refuse)
    found = with_card(RowFigures.of(BY_NAME[BF16]), BY_NAME[BF16])
    assert found.card is None
    assert "reads a clock" in found.reasons[CUDA]


def test_ctrl_c_leaves_the_rows_that_are_known(monkeypatch):
    numbers = iter(range(3))

    def known(row_figures: RowFigures, _: object) -> RowFigures:
        if next(numbers) == 2:
            raise KeyboardInterrupt
        return replace(row_figures, card=a_card(3 * 1024**3))

    monkeypatch.setattr(figures, "with_card", known)
    console = Console(width=WIDTH, record=True, file=io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        show.table(console, is_live=True)
    shown = [line for line in console.export_text().splitlines() if "3.00" in line]
    assert [line.split("  ")[1] for line in shown] == ["Baseline (FP32)", "BF16 + Checkpointing"]


def test_live_figures_are_shown_row_by_row(monkeypatch):
    cpu = CpuFigures(
        strategies=(), numerics="exact", predicted_peak_bytes=100, peak_allocated_bytes=80,
        sample_seconds=2.0,
    )  # fmt: skip
    monkeypatch.setattr(figures, "with_card", lambda row, _: replace(row, card=a_card(2**30)))
    monkeypatch.setattr(figures, "with_cpu", lambda row, _: replace(row, cpu=cpu))
    result, text = shown_of(("--table", "live"))
    assert "running here: Baseline" in text
    assert "+25.00 %" in text
    assert result["rows"][0]["cpu"]["peak_allocated_bytes"] == 80


@pytest.mark.parametrize("content", ["", "[]", '{"rows": []}', '{"date": 1, "rows": [{}]}'])
def test_a_broken_record_is_named(tmp_path, content):
    (path := tmp_path / "table.json").write_text(content)
    with pytest.raises(DataError, match=r"table\.json"):
        recorded_table(path)


@pytest.mark.slow  # bitsandbytes and PEFT are imported
def test_four_bit_transformers_leave_convolutions_in_training():
    job = build_job(DEMO, StepSettings(batch_size=2))
    session = open_plain_session(job, CPU, find_layout(job))
    weights = dict(session.model.named_parameters())
    undo = four_bit_base(DEMO).apply(session)
    trained = {id(each) for group in session.optimizer.param_groups for each in group["params"]}
    assert id(weights["rgb.video.mask.weight"]) in trained
    assert weights["rgb.video.mask.weight"].requires_grad
    assert id(weights["fusion.layers.0.attention.out_proj.weight"]) not in trained
    adapters = [name for name, _ in session.model.named_parameters() if "lora_A" in name]
    assert adapters
    assert all(".layers." in name for name in adapters)
    undo()
    assert {name: id(each) for name, each in session.model.named_parameters()} == {
        name: id(each) for name, each in weights.items()
    }
    groups = session.optimizer.param_groups
    assert len([each for group in groups for each in group["params"]]) == len(weights)
    assert all(each.requires_grad for each in weights.values())
