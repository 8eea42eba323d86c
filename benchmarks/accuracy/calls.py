"""Constructor calls as rows quote them, read without running them."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_FIRST_CALL = re.compile(r"[A-Za-z_][\w.]*\(.*\)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call: the dotted name, and the arguments that are plain values or calls."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def last_name(self) -> str:
        """Return the name without the modules before it."""
        return self.name.rpartition(".")[2]


def parse_call(text: str | None) -> Call | None:
    """Read the call in a text; None where there is none that Python would understand.

    An argument that is neither a plain value nor a call is left out: it names something that only
    the authors' program knows.
    """
    match = _FIRST_CALL.search(text or "")
    if match is None:
        return None
    try:
        node = ast.parse(match[0], mode="eval").body
    except SyntaxError:
        return None
    return _call(node) if isinstance(node, ast.Call) else None


def inner_calls(call: Call | None) -> tuple[Call, ...]:
    """Return a call and the calls among its arguments, outermost first."""
    if call is None:
        return ()
    inside = [each for each in (*call.args, *call.kwargs.values()) if isinstance(each, Call)]
    return (call, *(deeper for each in inside for deeper in inner_calls(each)))


def _call(node: ast.Call) -> Call:
    args = [_value(each) for each in node.args]
    kwargs = {each.arg: _value(each.value) for each in node.keywords if each.arg}
    return Call(
        name=ast.unparse(node.func),
        args=tuple(each for each in args if each is not _UNKNOWN),
        kwargs={name: each for name, each in kwargs.items() if each is not _UNKNOWN},
    )


_UNKNOWN = object()


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Call):
        return _call(node)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return _UNKNOWN
