"""Records which operators a step calls, on which tensors, with which other arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

import torch

from memfit.analysis.draw_states import DrawStates
from memfit.trace.modes import OperatorMode
from memfit.trace.modules import ModuleTracker, Place
from memfit.trace.operators import draws, tensors_in

_ASKS_NOTHING = (
    torch.ops.prim.device.default,
    torch.ops.aten._has_compatible_shallow_copy_type.default,
    torch.ops.aten.is_same_size.default,
    torch.ops.aten.sym_size.int,
)
_NEW = (torch.ops.aten.new_empty_strided.default, torch.ops.aten.empty.memory_format)
_COPY = torch.ops.aten.copy_.default
_DETACH = torch.ops.aten.detach.default
_CLONE = torch.ops.aten.clone.default
_SMALL = 64

Contents = tuple[float, ...] | bytes
"""The numbers of a small tensor, or a digest of a larger one."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of a recording, by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What is known of a recorded tensor: its memory, and how it lies in it."""

    sizes: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: int
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Count the elements."""
        count = 1
        for extent in self.sizes:
            count *= extent
        return count

    @property
    def last(self) -> int:
        """Return the place of the last element in memory."""
        steps = zip(self.sizes, self.stride, strict=True)
        return self.offset + sum((extent - 1) * stride for extent, stride in steps)


class Role(StrEnum):
    """What a call stands for where a loop over samples was rolled up (memfit.analysis.loops)."""

    ITSELF = ""
    TAKE = "take"
    """Take each sample out of a batch."""
    JOIN = "join"
    """Put all samples behind one another, in order."""
    SUM = "sum"
    """Add up what belongs to one sample over all samples, and what belongs to none."""
    PLACE = "place"
    """Put each sample's gradient back in its place."""


@dataclass(slots=True)
class Call:
    """One call of an operator. Tensors among arguments and results are given as ``Ref``."""

    func: Any
    arguments: tuple[Any, ...]
    """In the order of the operator's schema, with its defaults."""
    results: tuple[Ref, ...]
    place: Place
    is_backward: bool
    role: Role = Role.ITSELF
    draws_anew: bool = False
    """Whether it draws random numbers from a state that the step has set itself."""


@dataclass(slots=True)
class Dataflow:
    """All operators of a step, in order."""

    calls: list[Call] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=list)
    values: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Of small tensors whose numbers are known."""
    digests: dict[int, bytes] = field(default_factory=dict)
    """Of the contents of larger tensors that no operator has made, where they are there."""
    foreign: list[int] = field(default_factory=list)
    """Tensors that no operator has made, in the order in which they were met."""
    objects: list[Any] = field(default_factory=list)
    """The tensors and their memory, kept so that an address means one tensor."""


class DataflowRecorder(OperatorMode):
    """Record the operators of everything done while it is active.

    Tensors are told apart by their memory and their layout in it, since autograd gives what it has
    saved as another object.

    Args:
        model: whose modules are named.
        generators: of random numbers that outlive the step, besides torch's own.
    """

    def __init__(self, model: torch.nn.Module, generators: Iterable[torch.Generator] = ()) -> None:
        super().__init__()
        self._draws = DrawStates(generators)
        self._watch = ExitStack()
        self.flow = Dataflow()
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._contents: dict[int, Contents | None] = {}
        self._seen: dict[int, tuple[int, int]] = {}
        self._modules = ModuleTracker()
        self._modules.name_modules(model)

    def __enter__(self) -> Self:
        self._watch.enter_context(self._draws.watched())
        self._watch.enter_context(self._modules)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, exc_type: Any, exc: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc, traceback)  # type: ignore[no-untyped-call]
        with self._watch:
            for call in self._draws.set_at_last():
                call.draws_anew = True

    def number_of(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor; one that was not met before is foreign."""
        return self._number(tensor, is_made=False)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor was met."""
        return _key_of(_shape_of(tensor)) in self._numbers

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func in _ASKS_NOTHING:
            return func(*args, **kwargs)
        is_backward = torch._C._current_graph_task_id() != -1
        place = self._modules.in_backward() if is_backward else self._modules.in_forward()
        given = tuple(self._noted(value) for value in _in_order(func, args, kwargs))
        out = func(*args, **kwargs)
        # What is written to memory as it was found may leave no trace on the tensor's version.
        holds_values = "empty" not in func.__name__
        results = tuple(
            Ref(self._number(each, is_made=True, holds_values=holds_values))
            for each in tensors_in(out)
        )
        call = Call(func, given, results, place, is_backward)
        if not is_backward and draws(func, args, kwargs):
            generator = next((each for each in given if isinstance(each, torch.Generator)), None)
            call.draws_anew = self._draws.draw(generator, call)
        self._add(call)
        return out

    def _add(self, call: Call) -> None:
        """Note a call; a copy into memory that was just made for it counts as a clone.

        Autograd copies a gradient so where somebody else holds it or where it lies otherwise than
        its parameter, which is no matter of what is computed; hooks on saved tensors copy so.
        """
        if call.func is _DETACH and call.results == call.arguments:
            return
        before = self.flow.calls[-1] if self.flow.calls else None
        if call.func is _COPY and before is not None and before.func in _NEW:
            new, source = (self.flow.shapes[ref.number] for ref in call.arguments[:2])
            is_alike = (new.sizes, new.dtype) == (source.sizes, source.dtype)
            if is_alike and before.results == (call.arguments[0],):
                arguments = (call.arguments[1], None)
                self.flow.calls[-1] = replace(call, func=_CLONE, arguments=arguments)
                return
        self.flow.calls.append(call)

    def _noted(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Ref(self._number(value, is_made=False))
        if isinstance(value, (list, tuple)):
            return tuple(self._noted(each) for each in value)
        return value

    def _number(self, tensor: torch.Tensor, *, is_made: bool, holds_values: bool = True) -> int:
        shape = _shape_of(tensor)
        key = _key_of(shape)
        number = self._numbers.get(key)
        if number is None:
            number = len(self.flow.shapes)
            self._numbers[key] = number
            self.flow.shapes.append(shape)
            self.flow.objects.append((tensor, _memory_of(tensor)))
            if not is_made:
                self.flow.foreign.append(number)
        if holds_values:
            self._note_values(tensor, number)
        else:
            self._note_contents(number, None)
        return number

    def _note_values(self, tensor: torch.Tensor, number: int) -> None:
        """Keep the numbers of a small tensor that is here, and a digest of a larger one."""
        is_fake = _is_fake(tensor)
        known = getattr(tensor, "constant", None) if is_fake else tensor
        if known is None or known.device.type == "meta" or known.layout is not torch.strided:
            self._note_contents(number, None)
            return
        seen = (id(known), known._version)
        if self._seen.get(number) == seen:
            return
        self._seen[number] = seen
        with torch.utils._python_dispatch._disable_current_modes():
            known = known.detach()
            if known.numel() > _SMALL:
                self._note_contents(number, _digest(known))
                return
            values = known.flatten().tolist()
        if all(isinstance(value, (int, float)) for value in values):
            self._note_contents(number, tuple(float(value) for value in values))

    def _note_contents(self, number: int, contents: Contents | None) -> None:
        """Keep what a tensor holds, unless it holds something else at another time."""
        if self._contents.setdefault(number, contents) != contents:
            self._contents[number] = contents = None
        self.flow.values.pop(number, None)
        self.flow.digests.pop(number, None)
        if isinstance(contents, bytes):
            self.flow.digests[number] = contents
        elif contents is not None:
            self.flow.values[number] = contents


def _digest(tensor: torch.Tensor) -> bytes:
    data = tensor.contiguous().cpu().flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=16).digest()


def _memory_of(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage() if tensor.layout is torch.strided else None


def refs_in(values: Any) -> Iterator[Ref]:
    """Yield the tensors among recorded arguments."""
    if isinstance(values, Ref):
        yield values
    elif isinstance(values, tuple):
        for value in values:
            yield from refs_in(value)


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.fake_tensor.FakeTensor)


def _shape_of(tensor: torch.Tensor) -> Shape:
    if tensor.layout is not torch.strided:
        return Shape(tuple(tensor.shape), (), 0, id(tensor), tensor.dtype)
    return Shape(
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        tensor.untyped_storage()._cdata,
        tensor.dtype,
    )


def _key_of(shape: Shape) -> tuple[Any, ...]:
    return (shape.storage, shape.offset, shape.sizes, shape.stride, shape.dtype)


def _in_order(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield an operator's arguments in the order of its schema, with its defaults."""
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            yield args[position]
        else:
            yield kwargs.get(argument.name, argument.default_value)
