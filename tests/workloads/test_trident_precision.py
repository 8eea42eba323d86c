"""Branches have precisions of their own, and what contradicts itself is refused."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
from tests.conformance.builders import large_residual, near_peak

import memfit
from memfit.errors import NoPlanFitsError, UsageError
from memfit.strategies import Bf16
from memfit_workloads.memory_settings import MemorySettings
from memfit_workloads.planned_memory import plan_memory
from memfit_workloads.trident import WORKLOAD, precision_plan
from memfit_workloads.trident.branches import PARTS
from memfit_workloads.trident.model import build_model
from memfit_workloads.trident.precision_plan import plan_with_precision
from memfit_workloads.trident.sizes import DEMO

MEMORY = MemorySettings(
    device="cpu", budget_bytes=None, budget_fraction=None, allow=("bf16",), require=("bf16",),
    plan_file=None,
)  # fmt: skip


def branches_of(*words: str):
    parser = argparse.ArgumentParser()
    WORKLOAD.add_arguments(parser)
    settings = WORKLOAD.settings_from(parser.parse_args(["--synthetic", *words]), "memfit train")
    return settings.branches, settings.memory_settings.require


@pytest.mark.parametrize(
    ("words", "autocast", "kept"),
    [
        ("", "fp32", ()),
        ("--use-bf16", "bf16", ()),
        ("--use-bf16 --precision fusion=fp32", "bf16", ("fusion",)),
        ("--use-fp16 --precision rgb=fp32 fusion=fp32", "fp16", ("rgb", "fusion")),
        ("--precision rgb=bf16", "bf16", ("infrared", "kinematics", "fusion")),
        ("--precision rgb=bf16 --freeze-branches infrared", "bf16", ("kinematics", "fusion")),
        ("--allow bf16 --precision fusion=fp32", "fp32", ("fusion",)),
    ],
)
def test_what_is_not_named_has_the_type_of_the_whole(words, autocast, kept):
    found, require = branches_of(*words.split())
    assert (found.autocast, found.kept) == (autocast, kept)
    assert require == ((autocast,) if autocast != "fp32" else ())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--precision fusio=fp32", "needed is BRANCH=TYPE"),
        ("--precision fusion=int8", "needed is BRANCH=TYPE"),
        ("--precision fusion", "needed is BRANCH=TYPE"),
        ("--precision rgb=bf16 infrared=fp16", "one short type"),
        ("--use-bf16 --precision infrared=fp16", "one short type"),
        ("--precision rgb=bf16 rgb=fp32", "leave one of them out"),
        ("--precision rgb=bf16 --freeze-branches rgb", "frozen branch"),
        ("--plan p.yaml --precision fusion=fp32", "--plan says"),
        (
            "--use-bf16 --precision rgb=fp32 infrared=fp32 kinematics=fp32 fusion=fp32",
            "nothing in bf16",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(words, message):
    with pytest.raises(UsageError, match=message):
        branches_of(*words.split())


def test_a_file_says_it_as_a_list(tmp_path):
    (tmp_path / "it.yml").write_text("use_bf16: true\nprecision: [rgb=fp32, fusion=fp32]\n")
    found, _ = branches_of("--config", str(tmp_path / "it.yml"))
    assert found.kept == ("rgb", "fusion")


@pytest.fixture
def quick(monkeypatch):
    """Have the planner find bf16 alone, without looking."""
    monkeypatch.setattr(
        precision_plan,
        "plan_training",
        lambda job, settings, micro, fixed: plan_memory(job, settings, (*fixed, Bf16())),
    )


@pytest.mark.slow
def test_what_is_kept_is_in_the_plan_and_counted(quick):
    job = large_residual()
    planned = plan_with_precision(job, MEMORY, None, ("0", "2"))
    assert planned.plan.strategies == (Bf16(keep=("0", "2")),)
    assert planned.to_json()["numerics"] == "approximate"
    measured = memfit.measure(job, planned.plan).peak_allocated_bytes
    assert planned.planned.peak_allocated_bytes == near_peak(measured)


@pytest.mark.slow
def test_a_budget_that_what_is_kept_breaks_is_an_error(quick):
    job, kept = large_residual(), ("0-2",)
    needed = memfit.predict(job, plan=memfit.Plan(strategies=(Bf16(keep=kept),)))
    tight = replace(MEMORY, budget_bytes=needed.peak_allocated_bytes - 1)
    with pytest.raises(NoPlanFitsError, match="fewer parts in fp32"):
        plan_with_precision(job, tight, None, kept)
    fits = replace(MEMORY, budget_bytes=needed.peak_allocated_bytes)
    assert plan_with_precision(job, fits, None, kept).planned.fits


def test_the_parts_are_modules_of_the_model():
    model = build_model(DEMO, 0)
    assert set(PARTS) <= {name for name, _ in model.named_children()}
