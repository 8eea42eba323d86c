"""Memory that runs out once more, anywhere while a cut update is undone, changes nothing."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memfit
from memfit import Plan
from memfit.errors import MemfitError

pytestmark = pytest.mark.slow

_ITEM = torch.ops.aten._local_scalar_dense.default
"""Adam asks for its count of steps when it has changed some of what it changes."""


class _Faults(TorchDispatchMode):
    """Memory runs out in the first update, and again some operators later."""

    def __init__(self, num_later: int) -> None:
        super().__init__()
        self._num_later = num_later
        self._has_struck = False
        self.since: list[str] = []
        """Operators that have run since the first fault."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self._has_struck:
            self.since.append(func.overloadpacket.__name__)
        elif func is _ITEM:
            self._has_struck = True
            func(*args, **(kwargs or {}))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if self._has_struck and len(self.since) == self._num_later:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return func(*args, **(kwargs or {}))


def _job() -> memfit.Job:
    def model() -> nn.Module:
        torch.manual_seed(3)
        return nn.Linear(4, 2)

    return memfit.Job(
        model=model,
        batch=lambda num_samples: torch.randn(num_samples, 4),
        loss=lambda model, batch: (model(batch) ** 2).mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        batch_size=4,
    )


def _trained(faults: _Faults | None) -> list[torch.Tensor] | None:
    """Return parameters and states after three steps; None if the run was ended by name."""
    torch.manual_seed(0)
    plan = Plan(ladder=(Plan(),) * 3)
    try:
        with memfit.start(_job(), plan, device="cpu") as run:
            for number in range(3):
                batch = torch.randn(4, 4)
                with faults if faults is not None and number == 1 else nullcontext():
                    run.step(batch)
            states = [
                value
                for state in run.optimizer.state.values()
                for value in state.values()
                if isinstance(value, torch.Tensor)
            ]
            return [each.detach().clone() for each in (*run.model.parameters(), *states)]
    except MemfitError:
        return None


@pytest.fixture(scope="module")
def wanted() -> list[torch.Tensor]:
    found = _trained(None)
    assert found is not None
    return found


def _names_of_operators() -> list[str]:
    """List the operators after the first fault."""
    once = _Faults(0)
    assert _trained(once) is not None
    return once.since


def _try(wanted: list[torch.Tensor], numbers: list[int]) -> None:
    ended = []
    for number in numbers:
        found = _trained(_Faults(number))
        if found is None:
            ended.append(number)
            continue
        assert all(map(torch.equal, found, wanted)), f"after operator {number}"
    assert len(ended) < max(1, len(numbers) / 10)


def test_a_second_fault_while_states_are_read_back_is_undone(wanted):
    names = _names_of_operators()
    copies = [number for number, name in enumerate(names, 1) if name == "copy_"]
    assert len(copies) > 10
    _try(wanted, copies[:12])


def test_a_second_fault_anywhere_is_undone_or_named(wanted):
    _try(wanted, [*range(1, len(_names_of_operators()) + 1)])
