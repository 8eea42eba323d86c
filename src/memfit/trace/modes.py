"""Modes, which see every operator or every function of torch for as long as they are active."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.errors import RecordingError
from memfit.trace.subclasses import is_left_to_a_class

_DEVICE = torch.ops.prim.device.default
_PLAINLY = torch._C.DispatchKey.CompositeExplicitAutograd


class OperatorMode(TorchDispatchMode):
    """See the operators, those of autograd's backward among them.

    Those on a wrapper, such as a DTensor, are left to its class; what that does to the tensors
    inside is seen. Questions for the device of a tensor are not. An operator that takes functions,
    such as flex attention, is seen as the operators that it consists of where nothing compiles it.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE:  # asked for so often that it goes the shortest way
            told = getattr(getattr(args[0], "fake_mode", None), "device_told_to_cpp", None)
            return func(*args) if told is None else told(args[0])
        if is_left_to_a_class(types):
            return self._leave(args, kwargs or {})
        if isinstance(func, HigherOrderOperator):
            _check_gradients(func, args)
            with self:
                return func.py_kernels[_PLAINLY](*args, **(kwargs or {}))
        return self._dispatch(func, args, kwargs or {})

    def _leave(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ARG002
        """Leave an operator to the class of one of its arguments."""
        return NotImplemented

    @abc.abstractmethod
    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator, and return what it returns."""


def _check_gradients(func: HigherOrderOperator, args: Sequence[Any]) -> None:
    """Refuse functions with trained tensors of their own: the compiler alone finds those.

    Raises:
        RecordingError: if a function that an operator is given has one.
    """
    for graph in args:
        if not isinstance(graph, torch.nn.Module):
            continue
        for tensor in (*graph.parameters(), *vars(graph).values()):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                raise RecordingError(
                    f"a function given to {func} uses a tensor of shape {tuple(tensor.shape)} that "
                    "requires gradients, and these are not followed through it",
                    "Detach it there to predict the rest, or use `memfit measure` on the GPU.",
                )


class Follower(Protocol):
    """Follows the operators that a recorder sees."""

    def before_operator(self, given: tuple[Any, ...]) -> None:
        """Hear of an operator before it runs."""

    def after_operator(self, name: str, given: tuple[Any, ...], out: Any) -> None:
        """Hear of an operator that has run."""


class FunctionMode(TorchFunctionMode):
    """See the functions and methods of tensors, above autograd."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return self._call(func, args, kwargs or {})

    @abc.abstractmethod
    def _call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function, and return what it returns."""
