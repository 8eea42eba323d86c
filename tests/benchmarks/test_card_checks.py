"""What runs on a card for a few minutes is tried here on the processor, with tiny models."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from math import log

import bench_operator_times
import pytest
import record_operators
import torch
from card_checks import cases, measuring, planning
from card_checks.jobs import card_jobs
from recording import matrix

from memfit.devices.catalogue import catalogued_device
from memfit.kernels.cpu_onednn_3_12.convolutions import is_beyond_rules


@pytest.fixture(autouse=True)
def settings_of_torch() -> Iterator[None]:
    """Take back what a process that measures sets for itself."""
    places = (torch.backends.cudnn, torch.backends.cuda.matmul)
    names = ("allow_tf32", "deterministic", "benchmark")
    before = [(p, name, getattr(p, name)) for p in places for name in names if hasattr(p, name)]
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    yield
    for place, name, value in before:
        setattr(place, name, value)
    torch.use_deterministic_algorithms(is_deterministic, warn_only=warns)


def test_each_workload_is_recorded_once_before_any_is_recorded_twice():
    entries = matrix.varied(matrix.all_entries())
    num_workloads = len({entry.workload for entry in entries})
    assert len({entry.workload for entry in entries[:num_workloads]}) == num_workloads
    assert sorted(each.name for each in entries) == sorted(e.name for e in matrix.all_entries())


def test_cases_cover_every_job_and_name_strategies_that_exist():
    found = cases.all_cases()
    assert {case.job for case in found} == set(card_jobs("tiny")) == set(card_jobs("card"))
    assert len({case.name for case in found}) == len(found)
    assert {case.strategy for case in found} - {None} <= set(cases.strategy_names())
    kinds = Counter(case.kind for case in found)
    assert kinds["plain"] == len(card_jobs("tiny"))
    assert kinds["budget"] == 2 * kinds["plain"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["micro-batching", "bf16"])
def test_a_case_is_planned_carried_out_and_compared(strategy):
    task = {"job": "mlp", "size": "tiny", "device": "cpu", "kind": "alone", "strategy": strategy}
    found = planning.planned(task)
    measured = measuring.carried_out({**task, "plan": found["plan"]})
    assert any(strategy in label for label in found["strategies"])
    predicted_bytes = found["predicted"]["peak_allocated_bytes"]
    if not (strategy == "bf16" and is_beyond_rules("bfloat16")):  # a note says that it is a guess
        assert measured["peak_allocated_bytes"] == pytest.approx(predicted_bytes, abs=64)
    same = measured["same"]
    assert same["plain_again"]["to_the_bit"]
    assert (same["with_plan"]["parameters_of_change"] > 1e-3) == (strategy == "bf16")


@pytest.mark.slow
def test_what_does_not_suit_a_job_is_said():
    task = {
        "job": "mlp",
        "size": "tiny",
        "device": "cpu",
        "kind": "alone",
        "strategy": "convolution-tiling",
    }
    assert "StrategyError" in planning.planned(task)["refused"]


def test_estimates_of_recorded_operators_are_about_right_for_every_class():
    path = bench_operator_times._RECORDED / "h200.json"
    recorded = json.loads(path.read_text("utf-8"))
    device = catalogued_device(recorded["device"])
    found = bench_operator_times.by_class(recorded["rows"], device)
    assert len(found) >= 12
    assert all(0.5 <= each["estimate"]["median"] <= 1.5 for each in found.values())
    errors = {
        way: sum(abs(log(each[way]["median"])) for each in found.values())
        for way in ("bare", "estimate")
    }
    assert errors["estimate"] < errors["bare"] / 3


@pytest.mark.slow
def test_operators_are_timed_beside_their_roofline_times(tmp_path):
    out = tmp_path / "operators.json"
    words = ["--device", "cpu", "--scale", "0.02", "--size", "tiny", "--most", "8"]
    assert record_operators.main([*words, "--out", str(out), "--seconds", "20"]) == 0
    found = json.loads(out.read_text("utf-8"))
    assert found["finished"]
    assert not found["failures"]
    assert min(row["seconds"] for row in found["rows"]) > 0
    assert min(row["roofline_seconds"] for row in found["rows"]) > 0
    products = [row for row in found["rows"] if row["operator"] == "mm"]
    assert products[0]["num_flops"] > 0
    assert {step["step"] for step in found["steps"]} >= {"step gpt2", "step cnn"}
