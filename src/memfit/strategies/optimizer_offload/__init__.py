"""Optimizer offload: the optimizer's states wait on the host or on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar

import torch

from memfit.session.host_tensors import MappedFile, PinnedMemory
from memfit.session.optimizer_facts import OWN_STEP, TORCH
from memfit.session.session import Session
from memfit.strategies.base import DISK, AbstractOffload, Numerics, Seam, Undo
from memfit.strategies.facts import JobFacts
from memfit.strategies.optimizer_offload.host_states import HostStates
from memfit.trace.events import Category, Phase
from memfit.units import KIB

_NEEDS_ALL = "LBFGS"
_UNSUITED_OPTIONS = {
    "capturable": "a captured step finds its states at the same addresses every time",
    "differentiable": "a differentiable update keeps its states in the graph",
}


@dataclass(frozen=True, kw_only=True)
class OptimizerOffload(AbstractOffload):
    """Keep the optimizer's states off the device, but for those of the parameter being updated.

    ``to`` is ``host`` (pinned memory, for training on a GPU) or ``disk`` (a file that is mapped
    into memory, so that the system keeps of it what there is room for). For each parameter in turn,
    states come to the device, the job's own optimizer makes the update there, and the states go
    back. ``optimizer.state`` holds them wherever they are, so checkpoints are those of the
    optimizer, and a step that is undone finds its states. Gradients are all there before the first
    update, so clipping and gradient scalers act as before.

    Under FSDP2 each rank keeps the states of its own shards so.

    Stays on the device: what is smaller than ``min_tensor_bytes``, as step counts and the states
    of biases are.

    Limits: nothing is computed while states move, twice over the link in every step: 16 bytes per
    fp32 parameter under Adam. Pinned memory comes in powers of two. Optimizers of torch.optim
    alone, without LBFGS, capturable or differentiable steps. Once undone, states come back to the
    device with the next step.
    Source: Ren et al. 2021 (ZeRO-Offload), https://arxiv.org/abs/2101.06840, section 4, for states
    on the host; here the update itself stays on the device.
    """

    min_tensor_bytes: int = 64 * KIB

    name: ClassVar[str] = "optimizer-offload"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    seams: ClassVar[frozenset[Seam]] = frozenset({Seam.OPTIMIZER})
    acts_on: ClassVar[Mapping[Category, float]] = {
        Category.OPTIMIZER_STATE: 1.0,
        Category.TEMPORARIES: 1.0,
    }
    acts_in: ClassVar[tuple[Phase, ...]] = (Phase.OPTIMIZER,)
    never_faster: ClassVar[bool] = True
    goes_with_shards: ClassVar[bool] = True
    excludes: ClassVar[Mapping[str, str]] = {
        "eight-bit-optimizer": "the 8-bit optimizer steps all parameters at once, states and all",
        "pure-bf16": "the rounding of updates goes through the states slice by slice on the device",
    }

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse the host where it is the device, and optimizers that need all states at once."""
        if reason := super().obstacle(facts):
            return reason
        if facts.optimizer_package != TORCH or facts.optimizer == _NEEDS_ALL:
            return (
                f"{facts.optimizer} may need the states of all parameters at once; optimizers of "
                f"torch.optim do not, except {_NEEDS_ALL}."
            )
        if facts.optimizer == "SGD" and "momentum" not in facts.optimizer_options:
            return "SGD without momentum keeps no states."
        for option, reason in _UNSUITED_OPTIONS.items():
            if option in facts.optimizer_options:
                return f"the optimizer is {option}, and {reason}."
        if OWN_STEP in facts.optimizer_attachments:
            return f"the optimizer has a {OWN_STEP}, which would be passed over."
        return None

    def apply(self, session: Session) -> Undo:
        """Move the states there are, and step one parameter at a time."""
        spill, is_on_disk = session.spill, self.to == DISK
        memory = (MappedFile if is_on_disk else PinnedMemory)(spill, "optimizer states")
        states = HostStates(session.optimizer, memory, spill, self.min_tensor_bytes)
        with ExitStack() as undos:
            session.update_contexts.append(states.visiting)
            undos.callback(session.update_contexts.remove, states.visiting)
            undos.callback(_OffloadedStep(session.optimizer, states).undo)
            return undos.pop_all().close


class _OffloadedStep:
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
        former: _OffloadedStep | None = getattr(self._before, "offloaded", None)
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


def _function_for(offloaded: _OffloadedStep) -> Any:
    """Make a function that optimizers can have as their step, and schedulers can wrap."""

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ARG001 - as torch
        return offloaded.run(closure)

    function: Any = torch.optim.Optimizer.profile_hook_step(step)
    function.offloaded = offloaded
    if offloaded._counts_calls:
        function._wrapped_by_lr_sched = True  # as schedulers mark theirs
    return function
