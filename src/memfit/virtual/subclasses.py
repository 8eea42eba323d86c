"""Makes wrappers of fake tensors: what lies inside is made fake, and wrapped as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from memfit.errors import OpaqueTensorError, RecordingError
from memfit.trace.subclasses import inside_of, is_hollow

_MOST_KNOWN_VALUES = 4096
_NESTED_WITHOUT_PARTS = "the batch has a nested tensor of layout torch.strided"
_MAKE_IT_JAGGED = (
    "Its sizes cannot be followed. Make it with layout=torch.jagged, or use `memfit measure`, "
    "which really runs the step."
)
One = Callable[[torch.Tensor], torch.Tensor]


def nested_int(number: int) -> torch.SymInt:
    """Make the number that stands for the lengths of a nested tensor's rows.

    Torch makes a symbol of a shape environment of it, to compile code for any lengths (
    ``FakeTensorMode.create_symbolic_nested_int``, torch 2.13). A recorded step has just one.
    """
    from torch.nested._internal.nested_int import NestedIntNode  # noqa: PLC0415 - imports dynamo

    return torch.SymInt(NestedIntNode(number, 1))


def is_nested_int(value: object) -> bool:
    """Return whether a value stands for the lengths of a nested tensor's rows."""
    return isinstance(value, torch.SymInt) and value.node.is_nested_int()


class FakeWrappers:
    """Turn the wrappers of one batch into fake ones; those that share tensors go on doing so.

    Args:
        mode: whose fake tensors are made.
        make_one: makes a plain tensor fake.
    """

    def __init__(self, mode: FakeTensorMode, make_one: One) -> None:
        self._mode = mode
        self._make_one = make_one
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a tensor fake, wrapper or not.

        Raises:
            OpaqueTensorError: if a wrapper does not say what it is made of.
            RecordingError: if rows of many lengths are laid out in torch's older way.
        """
        names = inside_of(tensor)
        if names is None:
            if is_hollow(tensor):
                raise OpaqueTensorError(type(tensor))
            if tensor.is_nested:
                raise RecordingError(_NESTED_WITHOUT_PARTS, _MAKE_IT_JAGGED)
            return self._make_one(tensor)
        inner = {name: self._fake_inside(getattr(tensor, name)) for name in names}
        return _wrapped_like(tensor, inner)

    def _fake_inside(self, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor  # a DTensor's mesh of devices
        if id(tensor) not in self._made:
            made = self.fake(tensor)
            if isinstance(made, FakeTensor):
                made.constant = _values_of(tensor)
            self._made[id(tensor)] = (tensor, made)  # held, so that nobody else gets its identity
        return self._made[id(tensor)][1]


def _wrapped_like(tensor: Any, inner: dict[str, Any]) -> torch.Tensor:
    """Wrap other tensors as a wrapper's own are."""
    kind = type(tensor)
    if not hasattr(kind, "__tensor_flatten__"):  # MaskedTensor
        masked: torch.Tensor = kind(*inner.values(), requires_grad=tensor.requires_grad)
        return masked
    _, context = tensor.__tensor_flatten__()
    size = tensor.size()
    if tensor.is_nested:
        rows = inner.get("_lengths", inner["_offsets"])
        size = tuple(each if isinstance(each, int) else rows.get_nested_int() for each in size)
    wrapped: torch.Tensor = kind.__tensor_unflatten__(inner, context, size, tensor.stride())
    return wrapped


def _values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Copy whole numbers that are few, such as the lengths of rows: they decide on shapes."""
    if isinstance(tensor, FakeTensor):
        tensor = tensor.constant  # type: ignore[assignment]  # a tensor or None
    if type(tensor) is not torch.Tensor or tensor.is_floating_point() or tensor.is_complex():
        return None
    if tensor.numel() > _MOST_KNOWN_VALUES or tensor.layout is not torch.strided:
        return None
    with no_dispatch():
        return tensor.detach().cpu().clone()
