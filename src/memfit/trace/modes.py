"""Modes, which see every operator or every function of torch for as long as they are active."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.trace.subclasses import is_left_to_a_class

_DEVICE = torch.ops.prim.device.default


class OperatorMode(TorchDispatchMode):
    """See the operators, those of autograd's backward among them.

    Those on a wrapper, such as a DTensor, are left to its class; what that does to the tensors
    inside is seen. Questions for the device of a tensor are not.
    """

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
        return self._dispatch(func, args, kwargs or {})

    def _leave(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ARG002
        """Leave an operator to the class of one of its arguments."""
        return NotImplemented

    @abc.abstractmethod
    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator, and return what it returns."""


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
