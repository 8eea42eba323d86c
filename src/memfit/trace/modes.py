"""Modes, which see every operator or every function of torch for as long as they are active."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorMode(TorchDispatchMode):
    """See the operators, those of autograd's backward among them."""

    def __init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._dispatch(func, args, kwargs or {})

    @abc.abstractmethod
    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Carry an operator out, and return what it returns."""


class FunctionMode(TorchFunctionMode):
    """See the functions and methods of tensors, above autograd."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return self._call(func, args, kwargs or {})

    @abc.abstractmethod
    def _call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function, and return what it returns."""
