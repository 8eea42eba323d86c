"""Follows code that does not say which part of a step it is in: phases, owners, the batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from memfit.trace.events import Category, Phase
from memfit.trace.operators import tensors_in
from memfit.trace.origins import line_of_user
from memfit.trace.owners import Owned
from memfit.trace.recorder import Recorder

_COPIES = ("_to_copy", "copy_")
_SHARDED = "FSDPModule"
"""What ``fully_shard`` makes of a module's class; its own import takes a second."""


class StepFollower:
    """Tell a recorder of the phases of a step, by what torch itself reports.

    The backward is where autograd's engine runs. The optimizer's part begins with what reads
    gradients after it (unscaling, clipping), or with the hook that every optimizer calls before its
    step, and ends with the hook after it; the rest is forward. What models and optimizers hold is
    known by then. The batch is what models are called with, and what comes from the host meanwhile.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # To hold an optimizer would keep its states in memory after the script has dropped them.
        self._optimizers: WeakValueDictionary[int, torch.optim.Optimizer] = WeakValueDictionary()
        self._handles: list[Any] = []
        self._is_after_backward = False
        self._since_backward: tuple[int, int] | None = None
        recorder.owners = self.owned
        recorder.follower = self

    def __enter__(self) -> Self:
        self._handles = [
            register_optimizer_step_pre_hook(self._begins),
            register_optimizer_step_post_hook(self._ends),
            register_module_forward_pre_hook(self._called),
        ]
        return self

    def __exit__(self, *exc_info: object) -> None:
        for handle in self._handles:
            handle.remove()

    def owned(self) -> Iterable[Owned]:
        """Yield what the models and optimizers seen so far hold."""
        for model in self._recorder.modules.models():
            for name, buffer in model.named_buffers():
                yield Owned(buffer, Category.BUFFERS, name.rpartition(".")[0])
            # What FSDP2 has gathered for a forward stands in the place of the optimizer's shards.
            parameters = () if _exchanges_shards(model) else model.named_parameters()
            for name, parameter in parameters:
                yield from Owned.with_gradient(parameter, name.rpartition(".")[0])
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    module = self._recorder.module_of(parameter)
                    yield from Owned.with_parameter(parameter, optimizer, module)

    def before_operator(self, given: tuple[Any, ...]) -> None:
        """Enter and leave the backward with autograd's engine."""
        recorder = self._recorder
        if torch._C._current_graph_task_id() != -1:
            between = recorder.phase is Phase.OPTIMIZER and self._is_after_backward
            if recorder.phase is Phase.FORWARD or between:
                recorder.enter_phase(Phase.BACKWARD)
            self._is_after_backward = False
            return
        if recorder.phase is Phase.BACKWARD:
            self._is_after_backward = True
            recorder.enter_phase(Phase.FORWARD)
            self._since_backward = recorder.history.length
        if (
            self._is_after_backward
            and recorder.phase is Phase.FORWARD
            and recorder.holds(given, Category.GRADIENTS)
        ):
            recorder.enter_phase(Phase.OPTIMIZER)
            if self._since_backward is not None:  # what prepares for it belongs to it
                recorder.history.rename_phase(Phase.OPTIMIZER, since=self._since_backward)

    def after_operator(self, name: str, given: tuple[Any, ...], out: Any) -> None:
        """Take what comes from the host in a forward, outside all modules, for the batch's."""
        recorder = self._recorder
        if name not in _COPIES or recorder.phase is not Phase.FORWARD or recorder.modules.depth:
            return
        if given and not recorder.hidden.is_counted(given[-1]):
            for tensor in tensors_in(out):
                recorder.call_batch(tensor, line_of_user())

    def _begins(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._optimizers.setdefault(id(optimizer), optimizer)
        self._is_after_backward = False
        self._recorder.enter_phase(Phase.OPTIMIZER)

    def _ends(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._recorder.enter_phase(Phase.FORWARD)

    def _called(self, _module: torch.nn.Module, inputs: object) -> None:
        """Go on with the forward, and take what a model is called with for the batch's."""
        recorder = self._recorder
        self._since_backward = None
        if self._is_after_backward and recorder.phase is Phase.OPTIMIZER:
            recorder.enter_phase(Phase.FORWARD)
        if recorder.modules.depth == 1:
            for tensor in tensors_in(inputs):
                recorder.call_batch(tensor)


def _exchanges_shards(model: torch.nn.Module) -> bool:
    """Return whether FSDP2 shards some of a model."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    return any(kind.__name__ == _SHARDED for kind in kinds)
