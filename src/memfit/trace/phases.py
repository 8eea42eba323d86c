"""Follows code that does not say which part of a step it is in: phases, modules, owners."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from memfit.trace.events import Phase
from memfit.trace.recorder import Owned, Recorder


class StepFollower:
    """Tell a recorder of the phases of a step, by what torch itself reports.

    The backward is where autograd's engine runs, the optimizer's part lies between the hooks that
    every optimizer calls, and the rest is forward. What the optimizers hold is known by then.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # To hold an optimizer would keep its states in memory after the script has dropped them.
        self._optimizers: WeakValueDictionary[int, torch.optim.Optimizer] = WeakValueDictionary()
        self._handles: list[Any] = []
        recorder.owners = self.owned
        recorder.follows_engine = True

    def __enter__(self) -> Self:
        self._handles = [
            register_optimizer_step_pre_hook(self._begins),
            register_optimizer_step_post_hook(self._ends),
        ]
        return self

    def __exit__(self, *exc_info: object) -> None:
        for handle in self._handles:
            handle.remove()

    def owned(self) -> Iterable[Owned]:
        """Yield what the optimizers seen so far hold: parameters, gradients and states."""
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    module = self._recorder.module_of(parameter)
                    yield from Owned.with_parameter(parameter, optimizer, module)

    def _begins(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._optimizers.setdefault(id(optimizer), optimizer)
        self._recorder.enter_phase(Phase.OPTIMIZER)

    def _ends(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._recorder.enter_phase(Phase.FORWARD)
