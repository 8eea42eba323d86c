"""What strategies keep beside model and optimizer is put back with a step that is undone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memfit
from memfit import Plan
from memfit.strategies.fp16 import Fp16
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.pure_bf16 import PureBf16

pytestmark = pytest.mark.slow

_ATEN = torch.ops.aten
IN_FORWARD = (_ATEN.tanh.default, 1)
LAST_OF_UPDATE = {
    # After the first and after the last draw of random bits.
    "pure-bf16": [(_ATEN.isnan.default, 1), (_ATEN.isnan.default, 4)],
    "fp16": [(_ATEN._amp_update_scale_.default, 1)],
}
STRATEGIES = {"pure-bf16": PureBf16(), "fp16": Fp16()}


class _Fault(TorchDispatchMode):
    """Memory runs out after an operator has run for so many times."""

    def __init__(self, fault):
        super().__init__()
        self._operator, self._left = fault

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is self._operator:
            self._left -= 1
            if self._left == 0:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return out


def _job():
    def model():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    return memfit.Job(
        name="small",
        model=model,
        batch=lambda num_samples: torch.randn(num_samples, 8),
        loss=lambda model, batch: (model(batch) ** 2).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )


def _trained(strategy, faults):
    """Return parameters and further states after three steps, with faults by step."""
    torch.manual_seed(0)
    smaller = Plan(strategies=(strategy, MicroBatching(micro_batch_size=2)))
    plan = Plan(strategies=(strategy,), ladder=(smaller,) * 3)
    generator = torch.Generator().manual_seed(1)
    with memfit.start(_job(), plan, device="cpu") as run:
        for number in range(3):
            batch = torch.randn(4, 8, generator=generator)
            with _Fault(faults.get(number, (None, 0))):
                run.step(batch)
        assert len(run.events) == len(faults)
        states = {n: part.state_dict() for n, part in run._steps.session.stateful.items()}
        return [each.detach().clone() for each in run.model.parameters()], states


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("step", [1, 2])
def test_an_update_that_is_undone_leaves_no_trace_under_a_plan_that_was_changed(name, step):
    """The strategies of the smaller plan have states of their own, which came after the start."""
    wanted, wanted_states = _trained(STRATEGIES[name], {0: IN_FORWARD})
    for fault in LAST_OF_UPDATE[name]:
        found, states = _trained(STRATEGIES[name], {0: IN_FORWARD, step: fault})
        assert all(map(torch.equal, found, wanted))
        assert str(states) == str(wanted_states)


def test_rounding_is_the_same_when_an_update_is_run_again():
    smaller = {0: (_ATEN.isnan.default, 1)}
    plain = _trained_in_whole({})
    assert all(map(torch.equal, _trained_in_whole(smaller), plain))


def _trained_in_whole(faults):
    """Train with a plan whose smaller plans are the same."""
    torch.manual_seed(0)
    own = Plan(strategies=(PureBf16(),))
    with memfit.start(_job(), Plan(strategies=(PureBf16(),), ladder=(own,)), device="cpu") as run:
        with _Fault(faults.get(0, (None, 0))):
            run.step(torch.ones(4, 8))
        assert len(run.events) == len(faults)
        return [each.detach().clone() for each in run.model.parameters()]
