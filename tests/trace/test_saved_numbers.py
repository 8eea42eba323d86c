"""Numbers that autograd keeps, such as the ``0.5`` of ``x * 0.5``, count to the byte."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit import Plan
from memfit.strategies import build_strategy
from memfit.trace.modes import OperatorMode
from memfit.trace.saved_numbers import kept_number_bytes


class _Repeated(nn.Module):
    """A layer, then one function again and again."""

    def __init__(self, function, way=None):
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.function, self.way = function, way

    def forward(self, x):
        x = self.layer(x)
        for _ in range(10):
            if self.way is None:
                x = self.function(x)
            else:
                x = checkpoint(self.function, x, use_reentrant=self.way)
        return x


def _job(model, *shape):
    return memfit.Job(
        name="numbers",
        model=model,
        batch=lambda num_samples: torch.randn(num_samples, *shape),
        loss=lambda model, batch: model(batch).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=8,
    )


FUNCTIONS = {
    "product": lambda x: x * 0.5 * x,
    "reflected": lambda x: (2 * x) * x,
    "quotient": lambda x: (x / 3) * x,
    "in place": lambda x: (x * x).mul_(2.0) * x,
    "true": lambda x: x * True * x,
    "new gelu": lambda x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0)))),
}
_MOST_BESIDE = 16
"""Bytes that a recomputation may take beside, in numbers that it lets go at once."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, None) for name in FUNCTIONS), ("new gelu", True), ("new gelu", False)],
)
def test_kept_numbers_are_counted_to_the_byte(name, way):
    job = _job(partial(_Repeated, FUNCTIONS[name], way), 32)
    apart = memfit.measure(job).peak_allocated_bytes - memfit.predict(job).peak_allocated_bytes
    assert 0 <= apart <= (_MOST_BESIDE if way is False else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "settings"),
    [("activation-checkpointing", {}), ("micro-batching", {"micro_batch_size": 2})],
)
def test_they_are_counted_under_plans(strategy, settings):
    def model():
        return nn.Sequential(*(_Repeated(FUNCTIONS["new gelu"]) for _ in range(3)))

    plan = Plan(strategies=(build_strategy(strategy, settings),))
    job = _job(model, 32)
    measured = memfit.measure(job, plan)
    apart = measured.peak_allocated_bytes - memfit.predict(job, plan=plan).peak_allocated_bytes
    assert 0 <= apart <= (_MOST_BESIDE if strategy == "activation-checkpointing" else 0)


@pytest.mark.slow
def test_attention_that_scales_its_queries_is_counted_to_the_byte():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    job = _job(Attention, 16, 32)
    assert memfit.predict(job).peak_allocated_bytes == memfit.measure(job).peak_allocated_bytes


def test_sums_keep_no_number():
    class Watch(OperatorMode):
        def __init__(self):
            super().__init__()
            self.kept = {}

        def _dispatch(self, func, args, kwargs):
            self.kept[func] = kept_number_bytes(func, args)
            return func(*args, **kwargs)

    x = torch.ones(2, requires_grad=True)
    with Watch() as watch:
        (x + 1.0), (x - 2), (x**3), (x * x), (x.detach() * 2.0)
        assert not any(watch.kept.values())
        (x * 2.0)
    assert watch.kept[torch.ops.aten.mul.Tensor] == 8
