"""Whether a job's own code may change tensors without autograd's notice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType

import torch

_NAMES = frozenset(
    (
        *("data", "numpy", "__array__", "asarray", "inference_mode", "dlpack"),
        *("to_dlpack", "from_dlpack", "data_ptr", "storage", "untyped_storage", "set_"),
    )
)
"""What gives access to a tensor's memory past its counter of changes, as attributes of anything."""
_NO_USERS = ("torch", "numpy", "builtins", "memfit")


def may_write_silently(model: torch.nn.Module, code: Iterable[CodeType]) -> bool:
    """Return whether the code of a job names what tensors can be changed with, unseen by autograd.

    Args:
        model: its modules' classes are looked at as well, whoever wrote them.
        code: of the functions and classes that are the user's.

    Limits: code that is written in other languages cannot be looked at.
    """
    return any(
        name in _NAMES or name.startswith("_fused")
        for each in (*code, *_code_of_modules(model))
        for name in _names_in(each)
    )


def _code_of_modules(model: torch.nn.Module) -> Iterator[CodeType]:
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    for kind in kinds:
        if kind.__module__.partition(".")[0] in _NO_USERS:
            continue
        for value in vars(kind).values():
            if isinstance(value, FunctionType):
                yield value.__code__
                yield from _called_by(value)


def _called_by(function: FunctionType) -> Iterator[CodeType]:
    """Yield the code of functions of the same package that a function names."""
    package = function.__module__.partition(".")[0]
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, FunctionType) and value.__module__.partition(".")[0] == package:
            yield value.__code__


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
