"""Writes down which functions of torch a forward calls, on tensors without values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from memfit.forward_state import not_repeatable
from memfit.live_state import LiveState

_READS = frozenset(
    {
        *("__get__", "size", "dim", "numel", "nelement", "stride", "is_contiguous", "__len__"),
        *("is_floating_point", "is_complex", "element_size", "storage_offset", "get_device"),
        *("ndimension", "data_ptr", "is_same_size", "result_type", "finfo", "__hash__"),
        *("is_shared", "is_pinned", "is_signed", "is_inference", "is_conj", "is_neg", "can_cast"),
        *("__format__", "__repr__", "promote_types", "_assert"),
    }
)
_NO_CHANGE = frozenset(
    {"contiguous", "to", "float", "double", "half", "bfloat16", "type", "expand", "cpu", "cuda"}
)
_TORCH_DRAWN = "torch: was drawn from"
_IN_PLACE = ("relu", "silu", "leaky_relu", "elu", "relu6", "hardswish", "hardsigmoid", "mish")


class NotCapturedError(Exception):
    """A forward cannot be followed; the message says why."""


@dataclass(frozen=True, slots=True)
class Ref:
    """Stand for a value of the graph in the arguments of a call."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a function of torch; it gives the values with the indices ``outs``."""

    function: Callable[..., Any]
    args: Any
    kwargs: Mapping[str, Any]
    inputs: tuple[int, ...]
    outs: tuple[int, ...]
    out_spec: Any

    @property
    def name(self) -> str:
        """Return the function's name without underscores at its ends."""
        name = str(getattr(self.function, "__name__", ""))
        return name.strip("_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor of the graph."""

    shape: tuple[int, ...]
    is_float: bool
    element_bytes: int

    @property
    def num_bytes(self) -> int:
        """Return the size."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count * self.element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A forward: values 0 to ``num_given`` - 1 are inputs, parameters and buffers, in order."""

    values: tuple[Value, ...]
    calls: tuple[Call, ...]
    num_inputs: int
    num_given: int
    outputs: tuple[int, ...]
    out_spec: Any


def capture(
    forward: Callable[..., Any],
    leaves: list[Any],
    spec: Any,
    members: Mapping[int, torch.Tensor],
    module: torch.nn.Module,
) -> Graph:
    """Run a forward on meta tensors.

    Args:
        forward: finds meta tensors in the places of its parameters and buffers.
        leaves: the arguments, flat, with meta tensors for tensors.
        spec: how they are nested.
        members: the meta tensors in the places of parameters and buffers.
        module: whose attributes must not change.

    Raises:
        NotCapturedError: if it does anything that cannot be carried out again piece by piece.
    """
    args, kwargs = tree_unflatten(leaves, spec)
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    with _disable_current_modes():
        recorder = _Recorder([*inputs, *members.values()])
        out = _followed(partial(forward, *args, **kwargs), recorder, module)
    num_given = recorder.num_given
    outs, out_spec = tree_flatten(out)
    if not all(isinstance(each, torch.Tensor) for each in outs):
        raise NotCapturedError("its output is not made of tensors alone")
    outputs = tuple(recorder.index_of(each) for each in outs)
    if len(set(outputs)) != len(outputs) or any(each < num_given for each in outputs):
        raise NotCapturedError("it returns what it was given, or one tensor twice")
    return Graph(
        values=tuple(map(_value, recorder.tensors)),
        calls=tuple(recorder.calls),
        num_inputs=len(inputs),
        num_given=num_given,
        outputs=outputs,
        out_spec=out_spec,
    )


def _followed(forward: Callable[[], Any], recorder: _Recorder, module: torch.nn.Module) -> Any:
    """Run a forward under a recorder, and put back what it changes."""
    state = LiveState({"": module}, leave_out=[*module.parameters(), *module.buffers()])
    if (reason := not_repeatable(state.obstacles)) is not None:
        raise NotCapturedError(reason)
    before = state.snapshot()
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            with _NoDraws(), recorder:  # type: ignore[no-untyped-call]
                out = forward()
    except NotCapturedError:
        raise
    except Exception as error:
        raise NotCapturedError(f"{type(error).__name__}: {error}") from error
    finally:
        # Draws from torch's own generators are refused above; a recording has no states of them.
        changes = [each for each in before.changes() if str(each) != _TORCH_DRAWN]
        if changes:
            before.restore()
    if changes:
        raise NotCapturedError(f"its forward changes {changes[0]}")
    return out


def _value(tensor: torch.Tensor) -> Value:
    return Value(
        shape=tuple(tensor.shape),
        is_float=tensor.is_floating_point(),
        element_bytes=tensor.element_size(),
    )


class _NoDraws(TorchDispatchMode):
    """Refuse operators that draw random numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotCapturedError(f"{func} draws random numbers")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchFunctionMode):
    """Note every function that gives tensors."""

    def __init__(self, given: list[torch.Tensor]) -> None:
        super().__init__()
        self.tensors = list(given)
        self.num_given = len(given)
        self.calls: list[Call] = []
        self._index = {id(tensor): place for place, tensor in enumerate(given)}
        self._dead: set[int] = set()
        self._autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")

    def index_of(self, tensor: torch.Tensor) -> int:
        """Return a tensor's place among the values."""
        if id(tensor) in self._dead or id(tensor) not in self._index:
            raise NotCapturedError("a tensor that no function gave, or that was overwritten")
        return self._index[id(tensor)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        self._refuse_contexts()
        overwritten = self._without_in_place(func, args, kwargs)
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        versions = [each._version for each in operands]
        out = func(*args, **kwargs)
        if versions != [each._version for each in operands]:
            raise NotCapturedError(f"{func} writes into a tensor")
        tensors, out_spec = tree_flatten(out)
        if not self._is_new(getattr(func, "__name__", ""), tensors):
            return out
        self._note(func, args, kwargs, tensors, out_spec)
        self._dead.update(overwritten)
        return out

    def _is_new(self, name: str, outs: list[Any]) -> bool:
        """Return whether a function has made tensors; refuse what has unknown effects."""
        tensors = [each for each in outs if isinstance(each, torch.Tensor)]
        if not tensors and name not in _READS:
            raise NotCapturedError(f"it calls {name}, whose effect is not known")
        if not tensors:
            return False
        if len(tensors) != len(outs):
            raise NotCapturedError(f"{name} gives more than tensors")
        if all(id(each) not in self._index for each in tensors):
            return True
        if name not in _NO_CHANGE:
            raise NotCapturedError(f"it calls {name}, which gives what it was given")
        return False

    def _note(self, func: Any, args: Any, kwargs: Any, tensors: list[Any], out_spec: Any) -> None:
        inputs: dict[int, None] = {}

        def ref(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            inputs[self.index_of(leaf)] = None
            return Ref(self.index_of(leaf))

        noted_args, noted_kwargs = tree_map(ref, (tuple(args), kwargs))
        outs = tuple(range(len(self.tensors), len(self.tensors) + len(tensors)))
        self._index.update(zip(map(id, tensors), outs, strict=True))
        self.tensors.extend(tensors)
        call = Call(
            function=func,
            args=noted_args,
            kwargs=noted_kwargs,
            inputs=tuple(inputs),
            outs=outs,
            out_spec=out_spec,
        )
        self.calls.append(call)

    def _refuse_contexts(self) -> None:
        autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
        if not torch.is_grad_enabled() or autocast != self._autocast:
            raise NotCapturedError("it switches gradients or autocast by itself")

    def _without_in_place(self, func: Any, args: Any, kwargs: dict[str, Any]) -> list[int]:
        """Turn ``inplace=True`` of an activation off; what it overwrites is not used again."""
        if not kwargs.get("inplace") or getattr(func, "__name__", "") not in _IN_PLACE:
            return []
        kwargs["inplace"] = False
        (target,) = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        storage = target.untyped_storage()._cdata
        sharing = [each for each in self.tensors if each.untyped_storage()._cdata == storage]
        if len(sharing) > 1 or self.index_of(target) < 0:
            raise NotCapturedError("an activation overwrites a tensor that has views")
        return [id(target)]
