"""Records a step: which storages operators return, and when they die.

Every storage that an operator returns is noted when it appears and when it dies. Nothing is added
up here; the events are replayed later under the rules of an allocator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch

from memfit.kernels.cpu import CpuKernels
from memfit.kernels.scratch import HiddenMemory, Scratch
from memfit.trace.accumulation import Sums, accumulate_in_place, num_holders_when_exclusive
from memfit.trace.events import (
    ONLY_AMONG_RANKS,
    Allocation,
    Category,
    Extra,
    ModuleCall,
    Phase,
    StepMark,
    Trace,
)
from memfit.trace.lent_memory import memory_of
from memfit.trace.modes import Follower, OperatorMode
from memfit.trace.modules import ModuleTracker, Place
from memfit.trace.operators import changed_tensors, describe, tensors_in, with_memory
from memfit.trace.origins import line_of_caller, line_of_user, origins_noted
from memfit.trace.owners import Owned as Owned
from memfit.trace.owners import Owners
from memfit.trace.progress import WHO_IS_TOLD
from memfit.trace.purposes import purposes_heard, purposes_of
from memfit.trace.repetition import ForwardStart
from memfit.trace.resizing import hold_whole_storage, resizes_seen
from memfit.trace.saved_numbers import SavedNumbers
from memfit.trace.streams import current_stream
from memfit.trace.subclasses import check_can_be_taken_apart, parts_of

_LIFT_FRESH = torch.ops.aten.lift_fresh.default
_FAKE: Any = torch._C._TorchDispatchModeKey.FAKE
_LEFT_BY_FORWARD = (Phase.FORWARD, Category.TEMPORARIES)
_MOST_UNUSED = 2
"""Times the bytes of a tensor that its memory may have, to be called by what the tensor is for."""


class Recorder(OperatorMode):
    """Record the allocations, frees and operators of everything done while it is active.

    Does not see memory that an operator takes and gives back inside its kernel, except where
    ``hidden`` has a rule for it. Operators on the fake tensors of a mode that is entered inside are
    not noted: they stand for no memory, as DTensor's questions after the shapes of results.

    Args:
        owners: gives the tensors whose purpose is known, whenever it is asked.
        hidden: the kernels' hidden memory on the device, and which tensors lie there.
        beside: told of the tensors that do not lie there.
    """

    def __init__(
        self,
        owners: Owners = tuple,
        hidden: HiddenMemory | None = None,
        beside: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        num_holders_when_exclusive()
        self.owners = owners
        self.history = Trace()
        self.marks: list[StepMark] = []
        self.forward_starts: list[ForwardStart] = []
        self.follower: Follower | None = None
        self.hidden = hidden or CpuKernels()
        self._tell_beside = beside
        self._tell_progress = WHO_IS_TOLD.get()
        self._fake_mode: Any = None
        self._watches = ExitStack()
        events = self.history.events  # not through self: a cycle would keep histories for long
        self.live = _LiveStorages(lambda index: events.append(-1 - index))
        self.phase = Phase.SETUP
        self._phase_born: list[int] = []
        self._is_paused = False
        self._sums = Sums()
        hold = partial(self._allocate, category=Category.SAVED_ACTIVATIONS)
        is_host = self.hidden.is_counted(torch.empty(0, device="cpu"))
        self._numbers = SavedNumbers(hold, self.history.events, is_counted=is_host)
        self._step_began = (0, 0)
        self.modules = ModuleTracker(self._module_entered, self._module_left, self.history.lines)
        self._open_calls: list[ModuleCall | None] = []

    def __enter__(self) -> Self:
        self._fake_mode = torch._C._get_dispatch_mode(_FAKE)
        for watch in (
            self.modules,
            origins_noted(),
            resizes_seen(self._resized),
            purposes_heard(self.name_purpose, self.call_batch),
        ):
            self._watches.enter_context(watch)
        super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc, traceback)
        self._watches.close()

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not self._is_noting:
            return func(*args, **kwargs)
        if self.follower is not None:
            self.follower.before_operator((args, tuple(kwargs.values())))
        is_backward = self.phase is Phase.BACKWARD
        if is_backward and self._sums.is_in_place(func, args):
            out: Any = accumulate_in_place(func, args)
        else:
            out = func(*args, **kwargs)
            hold_whole_storage(func, args, kwargs, out)
        if is_backward:
            self._sums.note(out)
        self._note(func, args, kwargs, out)
        return out

    @property
    def _is_noting(self) -> bool:
        """Return whether what is done now is part of what is recorded."""
        is_ours = torch._C._get_dispatch_mode(_FAKE) is self._fake_mode
        return is_ours and not self._is_paused

    def _leave(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Leave an operator to a wrapper, unless nobody knows what that is made of."""
        for tensor in tensors_in((args, tuple(kwargs.values()))):
            check_can_be_taken_apart(tensor)
        return NotImplemented

    def release_cache(self) -> None:
        """Note that cached memory is given back."""
        self.history.releases.append(len(self.history.events))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing inside: what another process would allocate."""
        is_paused, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = is_paused

    def name_modules(self, model: torch.nn.Module) -> None:
        """Learn the names of the model's modules."""
        self.modules.name_modules(model)

    def module_of(self, parameter: torch.Tensor) -> str:
        """Name the module that holds a parameter."""
        return self.modules.module_of(parameter)

    def begin_step(self) -> None:
        """Say that a step begins."""
        self.modules.forget_nodes()
        self.phase = Phase.SETUP
        self._phase_born = []
        for owned in self.owners():
            for part in parts_of(owned.tensor):
                self._meet(part, "", Place())
        self._claim()
        self._step_began = (len(self.history.events), len(self.history.operations))

    def enter_phase(self, phase: Phase) -> None:
        """Say that another part of the step begins."""
        if phase is Phase.BACKWARD:
            # What forward made and backward still holds are saved activations.
            for key in self._phase_born:
                live = self.live.of_key(key)
                if live is not None:
                    allocation = self.history.allocations[live.index]
                    if (allocation.phase, allocation.category) == _LEFT_BY_FORWARD:
                        allocation.category = Category.SAVED_ACTIVATIONS
        self._claim()
        if phase is Phase.FORWARD:
            self.forward_starts.append(ForwardStart.at_end_of(self.history))
        self.phase = phase
        self._phase_born = []

    def end_step(self) -> StepMark:
        """Finish the step and say where it lies in the history."""
        self._numbers.end()
        self._claim()
        self.phase = Phase.SETUP
        (first_event, first_operation), history = self._step_began, self.history
        mark = StepMark(first_event, len(history.events), first_operation, len(history.operations))
        self.marks.append(mark)
        return mark

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Note an operator, its scratch and the storages it returned."""
        operation = describe(func, args, kwargs, out, self.phase)
        if operation is None:
            # The last of what ``torch.tensor`` does, and all that is seen of it; ``from_numpy``
            # ends so as well, in memory of another's.
            if func is _LIFT_FRESH and args[0].untyped_storage().resizable():
                self._meet(out, "tensor", self._place())
            return
        place = self._place()
        given, made = with_memory((args, *kwargs.values())), with_memory(out)
        operation.reads = self.live.allocations_of(given)
        operation.is_on_host = not any(map(self.hidden.is_counted, (*given, *made)))
        operation.changes = self.live.allocations_of(with_memory([*changed_tensors(func, args)]))
        operation.first_event = len(self.history.events)
        self.history.operations.append(operation)
        self._tell_progress(len(self.history.operations))
        before, scratch = self.hidden.around(func, args, kwargs, out)
        for num_bytes in before:
            self._keep(num_bytes, operation.name, place)
        in_backward = self.phase is Phase.BACKWARD
        self._numbers.before_result(func, args, place, in_backward=in_backward)
        first_new = len(self.history.allocations)
        for tensor in made:
            self._meet(tensor, operation.name, place)
        operation.writes = tuple(range(first_new, len(self.history.allocations)))
        for tensor, category in purposes_of(func, args, kwargs):
            self.name_purpose(tensor, category)
        if self.follower is not None:
            self.follower.after_operator(operation.name, tuple(given), out)
        if scratch is not None:
            self._pass_by(scratch, operation.name, place)
        self._numbers.after_operator(in_backward=in_backward)

    def _place(self) -> Place:
        """Tell the module and line that an operator belongs to."""
        if self.phase is Phase.BACKWARD:
            return self.modules.in_backward()
        # What is made before the steps is made for good, by a line that a user can change.
        return self.modules.in_forward(
            line_of_user if self.phase is Phase.SETUP else line_of_caller
        )

    def _module_entered(self, name: str) -> None:
        if not self._is_noting:
            self._open_calls.append(None)
            return
        call = ModuleCall(name, self.phase, len(self.history.operations))
        self._open_calls.append(call)
        self.history.calls.append(call)

    def _module_left(self) -> None:
        call = self._open_calls.pop() if self._open_calls else None
        if call is not None:
            call.last_operation = len(self.history.operations)

    def _meet(self, tensor: torch.Tensor, operator: str, place: Place) -> None:
        """Note a tensor's storage if it is new, or if it has been resized."""
        if not self.hidden.is_counted(tensor):
            if self._tell_beside is not None:
                self._tell_beside(tensor)
            return
        storage = memory_of(tensor)
        known = self.live.of_storage(storage)
        if known is not None and known.num_bytes == storage.nbytes():
            return
        if known is not None:
            self.live.end(storage._cdata)
        is_recomputed = self.phase is Phase.BACKWARD and self.modules.is_recomputing
        category = Category.SAVED_ACTIVATIONS if is_recomputed else Category.TEMPORARIES
        self._live_from_now(storage, operator, place, category)

    def _live_from_now(
        self, storage: torch.UntypedStorage, operator: str, place: Place, category: Category
    ) -> None:
        """Note a storage's memory from now until it dies."""
        index = self._allocate(storage.nbytes(), operator, place, category)
        is_a_modules = self.modules.depth > 0
        self._phase_born.append(self.live.add(storage, index, is_a_modules=is_a_modules))

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Note a storage that code has resized past all operators, as FSDP does.

        Its memory is made anew, and the old one is given back after its content was copied
        (aten/src/ATen/native/Resize.cpp, torch 2.13).
        """
        known = self.live.of_storage(storage)
        if known is None or known.num_bytes == storage.nbytes():
            return
        category = self.history.allocations[known.index].category
        if category is Category.SAVED_ACTIVATIONS:
            category = Category.TEMPORARIES  # what forward has left was lost or moved
        self._live_from_now(storage, "resize_", self._place(), category)
        self.history.events.append(-1 - known.index)

    def _allocate(self, num_bytes: int, operator: str, place: Place, category: Category) -> int:
        """Note an allocation and give its index."""
        index = len(self.history.allocations)
        self.history.allocations.append(
            Allocation(
                num_bytes,
                operator,
                self.phase,
                place.module,
                category,
                place.source_line,
                current_stream(),
            )
        )
        self.history.events.append(index)
        return index

    def _keep(self, num_bytes: int, operator: str, place: Place) -> None:
        """Note a library's workspace, which is never given back."""
        self._allocate(num_bytes, operator, Place("", place.source_line), Category.WORKSPACES)

    def _pass_by(self, scratch: Scratch, operator: str, place: Place) -> None:
        """Note memory that came and went inside one operator."""
        blocks = scratch.blocks or ((0,) if scratch.high_bytes else ())
        category = Category.GLOO_STAGING if scratch.is_staging else Category.TEMPORARIES
        indices = [self._allocate(num_bytes, operator, place, category) for num_bytes in blocks]
        if indices and scratch.certainty != "exact":
            low_bytes = max(0, blocks[-1] - (scratch.num_bytes - scratch.low_bytes))
            high_bytes = blocks[-1] + (scratch.high_bytes - scratch.num_bytes)
            extra = Extra(indices[-1], low_bytes, high_bytes, scratch.certainty, scratch.source)
            self.history.extras.append(extra)
        self.history.events += [-1 - index for index in reversed(indices)]

    def _claim(self) -> None:
        """Give every storage with a known owner its category, its module and its line."""
        for owned in self.owners():
            is_member = owned.category in (Category.PARAMETERS, Category.BUFFERS)
            known = self.modules.line_of_member(owned.tensor) if is_member else ""
            line = known or owned.source_line
            for allocation in self._allocations_behind(owned.tensor):
                if allocation.category not in ONLY_AMONG_RANKS:
                    allocation.category = owned.category
                allocation.module = owned.module
                allocation.source_line = self.modules.noted(line) or allocation.source_line

    def name_purpose(self, tensor: torch.Tensor, category: Category) -> None:
        """Give a tensor's memory the purpose that is said of it."""
        for allocation in self._allocations_behind(tensor):
            allocation.category = category

    def call_batch(self, tensor: torch.Tensor, source_line: str = "") -> None:
        """Take memory for the batch's that no module made, and that nothing else is known of."""
        if tensor.requires_grad:
            return
        for part in parts_of(tensor):
            live = self.live.of(part)
            # A few rows of what lies there for good are no reason to call all of it the batch.
            if live is None or live.is_a_modules or live.num_bytes > _MOST_UNUSED * part.nbytes:
                continue
            allocation = self.history.allocations[live.index]
            if allocation.category is Category.TEMPORARIES:
                allocation.category = Category.BATCH
                allocation.source_line = self.modules.noted(source_line) or allocation.source_line

    def holds(self, given: Any, category: Category) -> bool:
        """Return whether some tensor among arguments has memory of a category."""
        return any(
            allocation.category is category
            for tensor in tensors_in(given)
            for allocation in self._allocations_behind(tensor)
        )

    def _allocations_behind(self, tensor: torch.Tensor) -> Iterator[Allocation]:
        for part in parts_of(tensor):
            live = self.live.of(part)
            if live is not None:
                yield self.history.allocations[live.index]


@dataclass(slots=True)
class _Live:
    """A storage that is alive: its number of bytes, its place in the trace and its death watch."""

    num_bytes: int
    index: int
    watch: weakref.ref[Any]
    is_a_modules: bool
    """Whether a module was running when it was made."""


class _LiveStorages:
    """Know what is alive, and tell of whatever ends.

    Args:
        tell_ended: is given the allocation of a storage that has died.
    """

    def __init__(self, tell_ended: Callable[[int], None]) -> None:
        self._tell_ended = tell_ended
        self._of_key: dict[int, _Live] = {}

    def of(self, tensor: torch.Tensor) -> _Live | None:
        """Return what is known of a tensor's memory; None if that is nothing."""
        return self._of_key.get(memory_of(tensor)._cdata)

    def of_storage(self, storage: torch.UntypedStorage) -> _Live | None:
        """Return what is known of a storage."""
        return self._of_key.get(storage._cdata)

    def of_key(self, key: int) -> _Live | None:
        """Return what is known of a storage by its key; None if it has ended."""
        return self._of_key.get(key)

    def allocations(self) -> set[int]:
        """Return the allocations of all that is alive."""
        return {live.index for live in self._of_key.values()}

    def allocations_of(self, tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
        """Return the allocations that known tensors lie in, each once."""
        found: dict[int, None] = {}
        for tensor in tensors:
            live = self._of_key.get(memory_of(tensor)._cdata)
            if live is not None:
                found[live.index] = None
        return tuple(found)

    def add(self, storage: torch.UntypedStorage, index: int, *, is_a_modules: bool = False) -> int:
        """Have a storage stand for an allocation until it dies; return its key."""
        key: int = storage._cdata
        watch = weakref.ref(storage, lambda _: self.end(key))
        self._of_key[key] = _Live(storage.nbytes(), index, watch, is_a_modules)
        return key

    def end(self, key: int) -> None:
        """Forget a storage, and tell that it has ended."""
        live = self._of_key.pop(key, None)
        if live is not None:
            self._tell_ended(live.index)
