"""Records a step: the only dispatch-mode code in memfit.

Every storage that an operator returns is noted when it appears and when it dies. Nothing is added
up here; the events are replayed later under the rules of an allocator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.trace.accumulation import (
    accumulate_in_place,
    is_in_place_accumulation,
    num_holders_when_exclusive,
)
from memfit.trace.events import Allocation, Category, Phase, Trace
from memfit.trace.modules import ModuleTracker
from memfit.trace.operators import describe, tensors_in
from memfit.trace.scratch import scratch_bytes


@dataclass(frozen=True, slots=True)
class Owned:
    """A tensor whose purpose is known, and the module that holds it."""

    tensor: torch.Tensor
    category: Category
    module: str


@dataclass(slots=True)
class _Live:
    """A storage that is alive: its number of bytes, its place in the trace and its death watch."""

    num_bytes: int
    index: int
    watch: weakref.ref[Any]


class Recorder(TorchDispatchMode):
    """Record the allocations, frees and operators of a step.

    Does not see memory that an operator takes and gives back inside its kernel, except where
    ``memfit.trace.scratch`` has a rule for it.

    Args:
        owners: gives the tensors whose purpose is known, whenever it is asked.
    """

    def __init__(self, owners: Callable[[], Iterable[Owned]]) -> None:
        super().__init__()
        num_holders_when_exclusive()
        self._owners = owners
        self._live: dict[int, _Live] = {}
        self._trace = Trace()
        self._phase = Phase.SETUP
        self._forward_born: list[int] = []
        self._modules = ModuleTracker()

    def __enter__(self) -> Self:
        self._modules.__enter__()
        super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc, traceback)
        self._modules.__exit__(exc_type, exc, traceback)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._phase is Phase.BACKWARD and is_in_place_accumulation(func, args):
            out: Any = accumulate_in_place(args)
        else:
            out = func(*args, **kwargs)
        self._note(func, args, kwargs, out)
        return out

    def name_modules(self, model: torch.nn.Module) -> None:
        """Learn the names of the model's modules."""
        self._modules.name_modules(model)

    def begin_step(self) -> None:
        """Start a new trace with everything that is alive now."""
        self._modules.forget_nodes()
        self._phase = Phase.SETUP
        # Met before the new trace begins, in which everything alive is listed once.
        for owned in self._owners():
            self._meet(owned.tensor, "")
        self._trace = trace = Trace()
        self._forward_born = []
        for live in self._live.values():
            live.index = len(trace.allocations)
            trace.events.append(live.index)
            trace.allocations.append(
                Allocation(live.num_bytes, "", Phase.SETUP, "", Category.TEMPORARIES)
            )
        self._claim()

    def enter_phase(self, phase: Phase) -> None:
        """Say that another part of the step begins."""
        if self._phase is Phase.FORWARD and phase is Phase.BACKWARD:
            self._mark_saved()
        self._claim()
        self._phase = phase
        self._forward_born = []

    def end_step(self) -> Trace:
        """Finish the trace and hand it over."""
        self._claim()
        self._phase = Phase.SETUP
        return self._trace

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Note an operator, its scratch and the storages it returned."""
        is_backward = self._phase is Phase.BACKWARD
        module = self._modules.in_backward() if is_backward else self._modules.in_forward()
        operation = describe(func, args, kwargs, out, self._phase)
        if operation is None:
            return
        self._trace.operations.append(operation)
        for tensor in tensors_in(out):
            self._meet(tensor, operation.name, module)
        scratch = scratch_bytes(operation.name, args, out)
        if scratch:
            self._pass_by(scratch, operation.name, module)

    def _meet(self, tensor: torch.Tensor, operator: str, module: str = "") -> None:
        """Note a tensor's storage if it is new, or if it has been resized."""
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        known = self._live.get(key)
        if known is not None and known.num_bytes == num_bytes:
            return
        if known is not None:
            self._died(key, known.index)
        trace = self._trace
        index = len(trace.allocations)
        is_recomputed = self._phase is Phase.BACKWARD and self._modules.is_recomputing
        category = Category.SAVED_ACTIVATIONS if is_recomputed else Category.TEMPORARIES
        trace.allocations.append(Allocation(num_bytes, operator, self._phase, module, category))
        trace.events.append(index)
        watch = weakref.ref(storage, lambda _: self._died(key, None))
        self._live[key] = _Live(num_bytes, index, watch)
        if self._phase is Phase.FORWARD:
            self._forward_born.append(key)

    def _died(self, key: int, index: int | None) -> None:
        """Note the end of a storage."""
        live = self._live.get(key)
        if live is None or (index is not None and live.index != index):
            return
        del self._live[key]
        self._trace.events.append(-1 - live.index)

    def _pass_by(self, num_bytes: int, operator: str, module: str) -> None:
        """Note memory that came and went inside one operator."""
        index = len(self._trace.allocations)
        self._trace.allocations.append(
            Allocation(num_bytes, operator, self._phase, module, Category.TEMPORARIES)
        )
        self._trace.events += [index, -1 - index]

    def _mark_saved(self) -> None:
        """Call what forward made and backward still holds saved activations."""
        for key in self._forward_born:
            live = self._live.get(key)
            if live is not None:
                self._trace.allocations[live.index].category = Category.SAVED_ACTIVATIONS

    def _claim(self) -> None:
        """Give every storage with a known owner its category and module."""
        for owned in self._owners():
            live = self._live.get(owned.tensor.untyped_storage()._cdata)
            if live is not None:
                allocation = self._trace.allocations[live.index]
                allocation.category = owned.category
                allocation.module = owned.module
