"""The guide's formula gives the guide's figures, and says so where it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.errors import UsageError
from memfit.units import GIB, MIB
from memfit_workloads.reference_estimate import (
    PRINTED_GIB,
    ModelConfig,
    TrainingConfig,
    estimate_memory_usage,
    largest_batch_size,
    suggest_configurations,
)

ROWS = [
    (23.6, (45, 5, 225), 19.82),
    (24, (46, 5, 230), 20.20),
    (32, (64, 4, 256), 27.07),
    (40, (82, 3, 246), 33.94),
    (80, (128, 2, 256), 51.50),
]


@pytest.mark.parametrize(("memory_gib", "factors", "used_gib"), ROWS)
def test_the_first_stage_is_that_of_the_table(memory_gib, factors, used_gib):
    first, later = suggest_configurations(memory_gib, ModelConfig())

    names = ("batch_size", "accumulate_grad_batches", "effective_batch_size")
    assert tuple(first[name] for name in names) == factors
    assert first["memory_estimate"].total_bytes / GIB == pytest.approx(used_gib, abs=0.005)
    assert (first["n_positives"], first["n_negatives"]) == (32, 24)
    assert (later["n_positives"], later["n_negatives"]) == (16, 8)


@pytest.mark.parametrize("memory_gib", [23.4, 23.5, 23.7])
def test_a_card_of_24_gb_as_it_reports_itself_gives_the_printed_row(memory_gib):
    assert suggest_configurations(memory_gib, ModelConfig())[0]["batch_size"] == 45


def test_the_printed_figures_are_those_of_the_formula_but_for_the_v100():
    formula = {24: 19.82, 32: 27.07, 40: 33.94, 80: 51.50}
    differing = {
        card for card, printed in PRINTED_GIB.items() if abs(printed - formula[card]) > 0.1
    }

    assert differing == {32}
    later = suggest_configurations(80, ModelConfig())[1]["memory_estimate"]
    assert later.total_bytes / GIB == pytest.approx(21.43, abs=0.005)


def test_the_breakdown_is_that_of_the_table():
    estimate = estimate_memory_usage(ModelConfig(), TrainingConfig(batch_size=45, n_negatives=24))

    assert [round(part / MIB, 1) for part in estimate.parts().values()] == [
        *(200.7, 802.7, 200.7, 17554.4, 36.6, 1500.0)
    ]
    assert f"{estimate}".splitlines()[-1] == "Total               20,295.0 MB (19.82 GB)"
    assert ModelConfig().num_parameters == pytest.approx(105.2e6, rel=1e-3)


def test_a_larger_model_as_the_guide_writes_it_takes_more():
    large = ModelConfig(embedding_dim=768, lora_r=16, num_experts=8)
    training = TrainingConfig(batch_size=8)
    plain = estimate_memory_usage(ModelConfig(), training).total_bytes

    assert estimate_memory_usage(large, training).total_bytes > plain
    assert estimate_memory_usage(replace(large, use_fp16=False), training).total_bytes > plain


def test_checkpointing_is_a_quarter_and_positives_change_nothing():
    training = TrainingConfig(batch_size=8)
    plain = estimate_memory_usage(ModelConfig(), replace(training, gradient_checkpointing=False))
    estimate = estimate_memory_usage(ModelConfig(), training)

    assert plain.activation_bytes == 4 * estimate.activation_bytes
    assert estimate_memory_usage(ModelConfig(), replace(training, n_positives=64)) == estimate


def test_a_smaller_margin_gives_a_smaller_batch():
    careful = suggest_configurations(23.6, ModelConfig(), safety_margin=0.75)

    assert careful[0]["batch_size"] == 39


@pytest.mark.parametrize("margin", [0.0, -1.0, 1.5])
def test_a_margin_that_is_no_part_of_the_card_is_refused(margin):
    with pytest.raises(UsageError, match="a part of 1"):
        largest_batch_size(GIB, ModelConfig(), TrainingConfig(), margin)


def test_a_card_on_which_not_even_one_sample_fits_is_an_error():
    with pytest.raises(UsageError, match=r"Not even one anchor .* takes 3\.02 GB, and 85%"):
        suggest_configurations(2, ModelConfig())
