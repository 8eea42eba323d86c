"""The step of an optimizer whose states are on the host, in the place of its own."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from memfit.strategies.optimizer_offload.host_states import HostStates


class OffloadedStep:
    """Have ``optimizer.step()`` update one parameter at a time; hooks and schedulers go on.

    Undone, it stays until the next step, for which it brings the states back.

    Args:
        optimizer: of torch.optim.
        states: its own.
    """

    def __init__(self, optimizer: Any, states: HostStates) -> None:
        self._optimizer = optimizer
        self._states = states
        self._is_undone = False
        self._before = vars(optimizer).get("step")
        self._counts_calls = hasattr(self._before, "_wrapped_by_lr_sched")
        former: OffloadedStep | None = getattr(self._before, "offloaded", None)
        states.take_hold(None if former is None else former._states)
        if former is not None and isinstance(self._before, MethodType):
            self._before = former._before
        self._method = optimizer.step = MethodType(_function_for(self), optimizer)

    def run(self, closure: Callable[[], Any] | None) -> Any:
        """Step, inside the optimizer's hooks."""
        if self._counts_calls:
            self._optimizer._opt_called = True
        if self._is_undone:
            self._states.come_back()
            self._put_back()
            return type(self._optimizer).step.__wrapped__(self._optimizer, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._states.update()
        return loss

    def undo(self) -> None:
        """Have the optimizer step by itself again."""
        self._is_undone = True
        self._states.stop()
        if self._states.is_empty:
            self._put_back()

    def _put_back(self) -> None:
        own = vars(self._optimizer)
        if own.get("step") is not self._method:
            return  # a scheduler holds on to it
        del own["step"]
        if self._before is not None:
            self._optimizer.step = self._before


def _function_for(offloaded: OffloadedStep) -> Any:
    """Make a function that optimizers can have as their step, and schedulers can wrap."""

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ARG001 - as torch
        return offloaded.run(closure)

    function: Any = torch.optim.Optimizer.profile_hook_step(step)
    function.offloaded = offloaded
    if offloaded._counts_calls:
        function._wrapped_by_lr_sched = True  # as schedulers mark theirs
    return function
