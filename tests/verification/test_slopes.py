"""Masks, parts that cast to fp32, and kinks of the loss are no reason to doubt a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.conformance import builders
from tests.verification.test_verification import EXACT, UnreplayedMasks, plan_of
from torch import nn
from torch.nn import functional as F

from memfit import Job
from memfit.strategies.bf16 import Bf16
from memfit.strategies.micro_batching import MicroBatching
from memfit.verification.steps import StepResults, slope_error
from memfit.verification.verify import Verifier


@pytest.mark.slow
def test_masks_and_parts_that_insist_on_fp32_are_compared_in_fp64_for_each_plan_alone():
    def loss(model, batch):
        return (model(batch[0]).float() - batch[1].float()).square().mean()

    trial = Verifier(replace(builders.residual_with_dropout(), loss=loss))
    for size in (3, 2):
        found = trial.verify(plan_of(MicroBatching(micro_batch_size=size)))
        assert (found.bound, found.earned, found.is_proof) == (EXACT, "same-in-law", True)
        assert found.notes == ("parts that cast to a lower precision were compared in fp64",)
    assert trial.verify(plan_of(Bf16())).notes == ()
    found = trial.verify(plan_of(UnreplayedMasks()))
    assert not found.keeps_promise
    assert found.slope_error > 1e-3


class Kinked:
    """A step whose loss has a kink beside the start, and whose gradient may be wrong."""

    def __init__(self, *, kink: float, gradient: float) -> None:
        self._kink, self._gradient = kink, gradient

    def __call__(self, distance: float, direction: dict[str, torch.Tensor]) -> StepResults:
        at = 1.0 + distance * float(direction.get("weight", torch.zeros(())))
        gradients = {"weight": torch.tensor(self._gradient, dtype=torch.float64)}
        return StepResults(
            loss=torch.tensor(at + max(0.0, at - 1.0 - self._kink), dtype=torch.float64),
            gradients=gradients,
            parameters={"weight": torch.tensor(at, dtype=torch.float64)},
            buffers={},
        )


@pytest.mark.parametrize(
    ("kink", "gradient", "is_slope"),
    [(1.0, 1.0, True), (2e-6, 1.0, True), (2e-7, 1.0, True), (2e-6, 1.01, False)],
)
def test_a_kink_beside_the_start_is_no_wrong_gradient(kink, gradient, is_slope):
    error = slope_error(Kinked(kink=kink, gradient=gradient), 1e-4)
    assert (error <= 1e-4) == is_slope


class TiedToPadding(nn.Module):
    """Predict tokens by the rows that embed them, of which the one for padding gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8, padding_idx=0)
        layers = nn.Dropout(0.3), nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 8)
        self.body = nn.Sequential(*layers)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(self.embed(ids)) @ self.embed.weight.T


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [MicroBatching(micro_batch_size=3), UnreplayedMasks()])
def test_a_gradient_that_is_no_slope_by_itself_leaves_masks_unproved(strategy):
    def batch(size: int) -> torch.Tensor:
        ids = torch.randint(1, 16, (size, 6))
        ids[:, 0] = 0
        return ids

    job = Job(
        model=TiedToPadding,
        batch=batch,
        loss=lambda model, ids: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=7,
    )
    found = Verifier(job).verify(plan_of(strategy))
    assert (found.earned, found.is_proof, found.slope_error) == ("unproved", False, None)
    assert "the plain gradient is not the slope of the loss" in found.notes[0]
