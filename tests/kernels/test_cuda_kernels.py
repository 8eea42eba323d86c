"""What the kernels of a virtual card take: workspaces once per thread, scratch each time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.virtual.steps import training
from torch import nn

from memfit.devices.catalogue import load_device
from memfit.devices.spec import Fact
from memfit.prediction.recording import record_steps
from memfit.trace.events import Category
from memfit.units import MIB

DEFAULT = 8_519_680


def workspaces(device, version=(2, 13)) -> list[int]:
    recording = record_steps(
        training(lambda: nn.Linear(64, 64), 8, 64), device, torch_version=version
    )
    kept = recording.history.allocations
    return [a.num_bytes for a in kept if a.category is Category.WORKSPACES]


@pytest.mark.parametrize(
    ("name", "num_bytes"), [("t4", DEFAULT), ("a100-40gb", DEFAULT), ("h100-80gb", 32 * MIB)]
)
def test_forward_and_backward_hold_a_workspace_each_however_many_steps_follow(name, num_bytes):
    assert workspaces(load_device(name)) == [num_bytes, num_bytes]


def test_cublaslt_held_a_buffer_of_its_own_in_2_11():
    assert workspaces(load_device("t4"), (2, 11)) == [DEFAULT, MIB, DEFAULT]


def test_what_was_measured_on_the_card_counts_before_the_rule():
    device = load_device("t4")
    measured = Fact(value=MIB, source="test", read_on="2026-11-21", certainty="exact")
    facts = {**device.facts, "cublas_workspace_bytes": measured}
    assert workspaces(replace(device, facts=facts)) == [MIB, MIB]


def test_the_environment_sets_the_workspace(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert workspaces(load_device("t4")) == [128 * 1024, 128 * 1024]


def test_eager_attention_s_backward_takes_a_product_as_large_as_its_output():
    def setup():
        scores = torch.zeros(4, 128, 128, device="cuda", requires_grad=True)

        def step():
            scores.grad = None
            scores.softmax(-1).sum().backward()

        return step

    recording = record_steps(setup, load_device("t4"))
    found = [a for a in recording.steady.allocations if a.operator == "_softmax_backward_data"]
    assert [a.num_bytes for a in found] == [4 * 128 * 128 * 4] * 2  # the gradient, and the scratch
