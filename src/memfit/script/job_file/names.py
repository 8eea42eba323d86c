"""Which names a statement reads and writes, and how it is written out again."""

from __future__ import annotations

import ast
import builtins
import textwrap
from collections.abc import Iterable, Iterator

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_OWN_NAMES = (*_DEFINITIONS, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
BUILTINS = frozenset(dir(builtins)) | {"__file__", "__name__"}


def written(node: ast.AST) -> set[str]:
    """Return the names that a statement binds, or changes through an attribute or an index."""
    found: set[str] = set()
    for each in _outside_definitions(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, (ast.Store, ast.Del)):
            found.add(each.id)
        elif isinstance(each, (ast.Attribute, ast.Subscript)) and not isinstance(
            each.ctx, ast.Load
        ):
            found.add(root_of(each))
        elif isinstance(each, _DEFINITIONS):
            found.add(each.name)
        elif isinstance(each, (ast.Import, ast.ImportFrom)):
            found.update(_imported(each))
        elif isinstance(each, ast.ExceptHandler) and each.name:
            found.add(each.name)
    return found - {""}


def read(node: ast.AST) -> set[str]:
    """Return the names that a statement reads; those bound inside a comprehension are not meant."""
    found: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load):
            found.add(each.id)
        elif isinstance(each, (ast.Attribute, ast.Subscript)) and not isinstance(
            each.ctx, ast.Load
        ):
            found.add(root_of(each))
        elif isinstance(each, ast.AugAssign):
            found.add(root_of(each.target))
    return found - _bound_inside(node) - {""}


def read_by_all(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that any of these statements read."""
    return set().union(*(read(node) for node in nodes))


def written_by_all(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that any of these statements write."""
    return set().union(*(written(node) for node in nodes))


def root_of(node: ast.AST) -> str:
    """Return the name at the root of ``name.attribute[index](...)``; empty where there is none."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def called_name(call: ast.Call) -> str:
    """Return the last part of what is called: ``step`` for ``optimizer.step()``."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def calls_in(node: ast.AST, *names: str) -> list[ast.Call]:
    """Return the calls of these names inside a node, in the order of the text."""
    calls = [
        each for each in ast.walk(node) if isinstance(each, ast.Call) and called_name(each) in names
    ]
    return sorted(calls, key=lambda call: (call.lineno, call.col_offset))


def text_of(statement: ast.stmt, source: str) -> str:
    """Return a statement as it stands in its file, with comments, without indentation."""
    lines = source.splitlines()[statement.lineno - 1 : statement.end_lineno]
    decorators = getattr(statement, "decorator_list", [])
    if decorators:
        lines = source.splitlines()[decorators[0].lineno - 1 : statement.end_lineno]
    alone = not lines[0][: statement.col_offset].strip() or bool(decorators)
    # Indentation would change a string that runs over several lines.
    if not alone or any(
        isinstance(each, (ast.Constant, ast.JoinedStr))
        and (each.end_lineno or each.lineno) > each.lineno
        for each in ast.walk(statement)
    ):
        return ast.unparse(statement)
    text = textwrap.dedent("\n".join(lines))
    try:
        same = ast.dump(ast.parse(text).body[0]) == ast.dump(statement)
    except (SyntaxError, IndexError):
        same = False
    return text if same else ast.unparse(statement)


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    for alias in node.names:
        yield alias.asname or alias.name.partition(".")[0]


def _outside_definitions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and what is inside, without what functions and comprehensions keep to them."""
    yield node
    if isinstance(node, _OWN_NAMES):
        return
    for child in ast.iter_child_nodes(node):
        yield from _outside_definitions(child)


def _bound_inside(node: ast.AST) -> set[str]:
    """Return names that comprehensions, lambdas and functions inside a statement bind."""
    found: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.comprehension):
            found.update(name.id for name in ast.walk(each.target) if isinstance(name, ast.Name))
        elif isinstance(each, ast.arguments):
            found.update(arg.arg for arg in (*each.posonlyargs, *each.args, *each.kwonlyargs))
            found.update(arg.arg for arg in (each.vararg, each.kwarg) if arg)
        elif isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inner = {
                name.id
                for part in each.body
                for name in ast.walk(part)
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
            }
            declared = {
                name
                for part in ast.walk(each)
                if isinstance(part, ast.Global)
                for name in part.names
            }
            found.update(inner - declared)
    return found
