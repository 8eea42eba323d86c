"""Predictions for cards that memfit has no rules for, and for a user's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memfit
from memfit.allocator.settings import AllocatorSettings
from memfit.devices.catalogue import load_device
from memfit.figures import Topic
from memfit.prediction.advice import advise
from memfit.prediction.predict import evaluate
from memfit.prediction.recording import record
from memfit.strategies.plan import Plan

CARD = """
title = "A card that nobody has"
kind = "cuda"
compute_capability = "8.6"
"""
FIGURES = {
    "memory_bytes": 10**10,
    "memory_bandwidth_bytes_per_second": 5e11,
    "link_bytes_per_second": 1e10,
    "context_bytes": 3 * 10**8,
    "launch_seconds": 5e-6,
    "matrix_float32_flops_per_second": 1e13,
}
FACT = '\n[facts.{}]\nvalue = {}\nsource = "a test"\nread_on = "2026-01-31"\ncertainty = "table"\n'


def job() -> memfit.Job:
    return memfit.Job(
        model=lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4)),
        batch=lambda size: torch.randn(size, 64),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
        batch_size=16,
    )


@pytest.fixture
def own_card(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    text = CARD + "".join(FACT.format(*figure) for figure in FIGURES.items())
    (tmp_path / "my-card.toml").write_text(text)
    return "my-card.toml"


@pytest.fixture(scope="module")
def on_rocm() -> memfit.Prediction:
    return memfit.predict(job(), device="mi300x")


def test_every_term_on_rocm_is_a_guess_and_the_answer_says_so(on_rocm):
    assert on_rocm.certainty == "guess"
    assert {str(term.certainty) for term in on_rocm.terms} == {"guess"}
    assert all(term.source.startswith("Guess") for term in on_rocm.terms)
    assert [note for note in on_rocm.notes if "ROCm" in note and "mi300x" in note]


def test_intervals_on_rocm_are_those_of_guesses(on_rocm):
    cuda = memfit.predict(job(), device="a100-40gb")
    for figure in ("allocated", "reserved"):
        known, guessed = cuda.intervals[figure], on_rocm.intervals[figure]
        assert guessed.low_bytes < known.low_bytes
        assert guessed.high_bytes > known.high_bytes
    assert not [note for note in cuda.notes if "ROCm" in note]


@pytest.mark.parametrize(("name", "is_told"), [("a100-40gb", True), ("mi300x", False)])
def test_what_only_cuda_has_is_advised_on_cuda_alone(name, is_told):
    device = load_device(name)
    recording = record(job(), device=device)
    prediction = evaluate(job(), recording, device, Plan())
    topics = {each.topic for each in advise(recording, prediction, device, AllocatorSettings())}
    assert (Topic.GUESSED_TERM in topics) == is_told
    assert is_told or Topic.EXPANDABLE_SEGMENTS not in topics


@pytest.mark.slow
def test_a_users_own_card_is_predicted_alone_and_among_ranks(own_card):
    prediction = memfit.predict(job(), device=own_card)
    assert prediction.device == own_card
    assert any(term.num_bytes == 3 * 10**8 for term in prediction.terms)
    shared = memfit.predict(job(), placement=memfit.Placement(device=own_card, num_ranks=2))
    assert shared.device == own_card


@pytest.mark.slow
def test_a_plan_for_a_users_own_card_stays_in_its_memory(own_card):
    plan = memfit.plan(job(), device=own_card)
    assert plan.device == own_card
    assert plan.prediction.budget_bytes == 10**10


def test_a_name_as_people_write_it_is_answered_with_the_catalogues():
    assert memfit.predict(job(), device="tesla T4").device == "t4"
