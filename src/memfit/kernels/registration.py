"""One registration says all that a device does in one operator of torch.

An ``OPERATORS`` table maps names, ``topk`` for every overload or ``softmax.int`` for one, to
registrations. Their rules are functions that name the operator's arguments as its schema does and
are given those that they name; a rule with ``**arguments`` is given all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from torch._ops import OpOverload

Rule = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """What a device does in one operator; what is left out, torch's own fake tensors tell."""

    choice: Rule | None = None
    """Runs the operators that the device would choose in the place of a composite one, or returns
    ``NotImplemented`` where that is torch's own choice. It may name ``card``."""
    fake: Rule | None = None
    """Returns outputs on fake tensors. If it names ``out``, that is what torch's own fake returns;
    if not, torch's is not called."""
    scratch: Rule | None = None
    """Returns the memory that the kernel takes and gives back inside: a ``Scratch`` on CUDA, bytes
    on the CPU. It may name ``out``, what the operator returned, ``operands``, its arguments by
    position, and ``card``."""
    product: Rule | None = None
    """Describes a matrix product as a ``Product``, for the workspaces of cuBLAS; it may name
    ``name``, that of the operator."""
    keeps: Rule | None = None
    """Returns the bytes that the operator makes once and keeps for all later calls. It may name
    ``card``."""


class Operators:
    """The registrations of a device's operators, by name."""

    def __init__(self, table: Mapping[str, Operator]) -> None:
        self.table = table
        self._found: dict[OpOverload, Operator | None] = {}

    def find(self, func: OpOverload) -> Operator | None:
        """Return the registration of an overload, or of all overloads of its operator."""
        if func not in self._found:
            name = str(func).removeprefix("aten.")
            found = self.table.get(name) or self.table.get(name.rpartition(".")[0])
            self._found[func] = found
        return self._found[func]


def tables_in(package: str, path: Iterable[str]) -> dict[str, Operator]:
    """Join the ``OPERATORS`` of all files of a package, given its name and its ``__path__``."""
    files = [import_module(f"{package}.{module.name}") for module in iter_modules(path)]
    return {
        name: operator
        for file in files
        for name, operator in getattr(file, "OPERATORS", {}).items()
    }


def names_argument(rule: Rule, name: str) -> bool:
    """Return whether a rule asks for an argument by name."""
    return name in _parameters(rule)


def call_rule(
    rule: Rule, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], **context: Any
) -> Any:
    """Call a rule with the arguments that it names, defaults of the schema included.

    Args:
        rule: what is called.
        func: the overload whose schema names the arguments.
        args: by position.
        kwargs: by name.
        context: what rules may name besides.

    Returns:
        What the rule returns; ``NotImplemented`` if the overload lacks what the rule names.
    """
    names, defaults = _schema(func)
    known = defaults | dict(zip(names, args, strict=False)) | dict(kwargs) | context
    parameters = _parameters(rule)
    if any(is_required and name not in known for name, is_required in parameters.items()):
        return NotImplemented
    if "arguments" in parameters:
        return rule(**known)
    return rule(**{name: known[name] for name in parameters if name in known})


@cache
def _schema(func: OpOverload) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the names of an operator's arguments, and the defaults."""
    arguments = func._schema.arguments
    defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}
    return tuple(each.name for each in arguments), defaults


@cache
def _parameters(rule: Rule) -> Mapping[str, bool]:
    """Return what a rule names, and whether it cannot do without; ``arguments`` asks for all."""
    return {
        parameter.name: parameter.default is parameter.empty
        and parameter.kind is not parameter.VAR_KEYWORD
        for parameter in inspect.signature(rule).parameters.values()
    }
