"""Operands of other dtypes and the steps of losses take memory inside their operators."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import memfit
from memfit import Job
from memfit.kernels.cpu import scratch_bytes
from memfit.observe.allocator_events import AllocatorWatch

NUM_ELEMENTS = 4096
SLACK_BYTES = 64  # numbers become tensors of a few bytes


class Comparison(TorchDispatchMode):
    """Compare what every operator takes with what is predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with AllocatorWatch() as watch:
            out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        kept = 0 if name.endswith("_") else out.numel() * out.element_size()
        measured = max(0, watch.highest_growth_bytes() - kept)
        self.pairs.append((name, scratch_bytes(func, args, kwargs or {}, out), measured))
        return out


FLOATS = torch.rand(NUM_ELEMENTS)
HALVES = torch.rand(NUM_ELEMENTS).bfloat16()
MASK = torch.rand(NUM_ELEMENTS) > 0.5
INTEGERS = torch.ones(NUM_ELEMENTS, dtype=torch.int64)
SMALL_INTEGERS = INTEGERS.int()

CALLS = {
    "floats times a mask": lambda: FLOATS * MASK,
    "a mask times floats, in place": lambda: FLOATS.clone().mul_(MASK),
    "bf16 plus floats": lambda: HALVES + FLOATS,
    "floats added to bf16 in place": lambda: HALVES.clone().add_(FLOATS),
    "integers divided": lambda: INTEGERS / INTEGERS,
    "integers times a number": lambda: INTEGERS * 2.5,
    "one choice of two": lambda: torch.where(MASK, HALVES, FLOATS),
    "a comparison": lambda: HALVES > FLOATS,
    "a comparison of integers": lambda: SMALL_INTEGERS == INTEGERS,
    "the sum of a mask": lambda: MASK.sum(),
    "the sums of a mask": lambda: MASK.view(64, -1).sum(0),
    "the sum of small integers": lambda: SMALL_INTEGERS.sum(),
    "a sum in another dtype": lambda: HALVES.sum(dtype=torch.float32),
    "the mean of bf16": lambda: HALVES.mean(),
    "any": lambda: FLOATS.any(),
    "the root of integers": lambda: INTEGERS.sqrt(),
    "all in one dtype": lambda: torch.addcmul(FLOATS, FLOATS, FLOATS),
    "a number": lambda: HALVES * 2.0,
    "a scalar tensor": lambda: HALVES * torch.tensor(2.0),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_operands_of_other_dtypes_are_converted_as_a_whole(call):
    with Comparison() as comparison:
        call()
    assert comparison.pairs
    for _, predicted, measured in comparison.pairs:
        assert abs(predicted - measured) <= SLACK_BYTES


class Scale(nn.Module):
    """One weight, so that the loss is what takes memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.weight


def signs(target):
    return (target > 0.5).float() * 2 - 1


LOSSES = {
    "mse": functional.mse_loss,
    "smooth l1": functional.smooth_l1_loss,
    "huber": functional.huber_loss,
    "l1": functional.l1_loss,
    "binary cross entropy": lambda x, y, **kw: functional.binary_cross_entropy(
        x.sigmoid(), y, **kw
    ),
    "binary cross entropy with logits": functional.binary_cross_entropy_with_logits,
    "kl divergence": lambda x, y, **_: functional.kl_div(
        x.log_softmax(-1), y, reduction="batchmean"
    ),
    "soft margin": lambda x, y, **kw: functional.soft_margin_loss(x, signs(y), **kw),
    "poisson": functional.poisson_nll_loss,
    "cross entropy": functional.cross_entropy,
    "masked": lambda x, y, **_: ((x - y).square() * (y > 0.5)).sum() / (y > 0.5).sum(),
}


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_job_whose_loss_takes_most_is_predicted_within_a_thousandth(loss, reduction):
    job = Job(
        model=Scale,
        batch=lambda size: (torch.rand(size, 4096), torch.rand(size, 4096)),
        loss=lambda model, batch: loss(model(batch[0]), batch[1], reduction=reduction),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=16,
    )
    measured = memfit.measure(job)
    error_fraction = measured.predicted_peak_bytes / measured.peak_allocated_bytes - 1
    assert abs(error_fraction) < 0.001


@pytest.mark.slow
def test_columns_folded_into_images_keep_the_memory_of_the_columns():
    def loss(model, batch):
        columns = functional.unfold(model(batch), 3, padding=1)
        return functional.fold(columns, (32, 32), 3, padding=1).square().mean()

    job = Job(
        model=Scale,
        batch=lambda size: torch.rand(size, 4, 32, 32),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=8,
    )
    measured = memfit.measure(job)
    error_fraction = measured.predicted_peak_bytes / measured.peak_allocated_bytes - 1
    assert abs(error_fraction) < 0.01
