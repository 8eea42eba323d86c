"""Flex attention that nothing compiles: seen as the operators that it consists of."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as flex

import memfit
from memfit.errors import RecordingError

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")

HEADS, LENGTH, WIDTH, ROWS = 2, 128, 32, 2
SCORES_BYTES = ROWS * HEADS * LENGTH * LENGTH * 4


class Attention(nn.Module):
    """Takes a bias from each score: none, one of the distance, or one that is trained."""

    def __init__(self, bias: str = "") -> None:
        super().__init__()
        self.bias = bias
        self.into = nn.Linear(WIDTH, 3 * WIDTH)
        self.slopes = nn.Parameter(torch.ones(HEADS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.into(x).view(-1, LENGTH, 3, HEADS, WIDTH // HEADS).unbind(2)
        scores = {
            "": None,
            "distance": lambda score, _b, _h, i, j: score - (i - j).abs(),
            "trained": lambda score, _b, h, i, j: score + self.slopes[h] * (i - j),
        }
        mask = flex.create_block_mask(
            lambda _b, _h, i, j: i >= j, None, None, LENGTH, LENGTH, device=x.device
        )
        heads = (each.transpose(1, 2) for each in (query, key, value))
        return flex.flex_attention(*heads, score_mod=scores[self.bias], block_mask=mask)


def job_of(bias):
    return memfit.Job(
        model=lambda: Attention(bias),
        batch=lambda size: torch.randn(size, LENGTH, WIDTH),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=ROWS,
    )


@pytest.mark.slow
@pytest.mark.parametrize("bias", ["", "distance"])
def test_a_step_is_predicted_with_the_matrix_of_scores(bias, monkeypatch):
    found = memfit.predict(job_of(bias), device="t4")
    assert found.peak_allocated_bytes > SCORES_BYTES
    # Torch has the backward for the CPU as well, where it is not offered.
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    on_host = memfit.predict(job_of(bias)).peak_allocated_bytes
    assert on_host == pytest.approx(memfit.measure(job_of(bias)).peak_allocated_bytes, abs=128)


def test_a_trained_bias_inside_the_function_is_refused():
    with pytest.raises(RecordingError, match=r"shape \(2,\) that requires gradients"):
        memfit.predict(job_of("trained"), device="t4")
