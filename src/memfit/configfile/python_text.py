"""Literal values in Python files: constants, and keywords of calls such as TrainingArguments(...).

Python's own ``ast`` says where each literal stands, in the grammar of the Python that runs the
training. What is computed is never touched.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence

from memfit.errors import ConfigFileError
from memfit.journal.plain_text import TOO_DEEP, check_extent

from .tree import Entry, Insertion, Key, Scalar, Splice, Tree, Value, line_break_of, spliced

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")
_SHOWN_CHARACTERS = 40


def read_python(text: str) -> Tree:
    """Read assignments and keywords; a name that is given twice cannot be changed.

    Raises:
        ConfigFileError: if it is no Python.
    """
    try:
        check_extent(text)
        walk = _Walk(text)
        walk.visit(ast.parse(text))
    except (MemoryError, RecursionError):  # what Python's parser says of endless nesting
        raise ConfigFileError(f"it is no Python: {TOO_DEEP}") from None
    except (SyntaxError, ValueError) as error:
        where = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
        raise ConfigFileError(f"it is no Python: {error.args[0]}{where}") from None
    groups = frozenset(walk.groups)
    return Tree(entries=walk.entries, groups=groups, inline=groups, closed=walk.closed)


def edit_python(
    text: str, tree: Tree, replaced: Mapping[Key, Value], inserted: Sequence[Insertion]
) -> str:
    """Replace and insert literals."""
    splices = []
    for key, value in replaced.items():
        entry = tree.entries[key]
        old = text[entry.start : entry.end]
        splices.append(Splice(entry.start, entry.end, _spell(value, old)))
    for each in inserted:
        beside = tree.entries[each.beside]
        line_start = text.rfind("\n", 0, beside.key_start) + 1
        indent = text[line_start : beside.key_start]
        words = f"{each.name}={_spell(each.value, '')}"
        if indent.strip():
            splices.append(Splice(beside.end, beside.end, f", {words}"))
        else:  # on a line of its own, before the other so that each keeps its comment
            line = f"{words},{line_break_of(text)}{indent}"
            splices.append(Splice(beside.key_start, beside.key_start, line))
    return spliced(text, splices)


def _spell(value: Value, old: str) -> str:
    if isinstance(value, str):
        quote = "'" if old.endswith("'") else '"'
        return f"{quote}{value}{quote}"
    return repr(value)


class _Walk(ast.NodeVisitor):
    """Walk a module, and note where literals stand."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines = [line.group() for line in _LINE.finditer(text)]
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._scope: Key = ()
        self._calls: dict[Key, int] = {}
        self.entries: dict[Key, Entry] = {}
        self.groups: set[Key] = {()}
        self.closed: dict[Key, str] = {(): "it is a program, not a list of settings"}

    def visit_ClassDef(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Name what a class or a function sets after it."""
        outer, self._scope = self._scope, (*self._scope, node.name)
        self.groups.add(self._scope)
        self.closed[self._scope] = "it is a program, not a list of settings"
        self.generic_visit(node)
        self._scope = outer

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef  # noqa: N815 - as ast calls them

    def visit_Assign(self, node: ast.Assign) -> None:
        """Note a constant."""
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._bind((*self._scope, target.id), node.value, node)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Note a constant with a type, such as a field of a data class."""
        if isinstance(node.target, ast.Name) and node.value is not None:
            self._bind((*self._scope, node.target.id), node.value, node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Note the keywords of a call, under the last name of what is called."""
        name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
        if name and node.keywords:
            group = _group_of(str(name), node)
            line = self._calls.setdefault(group, node.lineno)
            self.groups.add(group)
            if any(keyword.arg is None for keyword in node.keywords):
                self.closed[group] = f"the call in line {node.lineno} is given a ** of settings"
            for keyword in node.keywords:
                if keyword.arg is not None:
                    self._bind((*group, keyword.arg), keyword.value, keyword)
            if line != node.lineno:
                self._say_twice(group, line, node.lineno)
        self.generic_visit(node)

    def _say_twice(self, group: Key, first: int, second: int) -> None:
        reason = f"there are several calls of {group[-1]} (lines {first} and {second})"
        self.closed[group] = reason
        for key, entry in list(self.entries.items()):
            if key[:-1] == group:
                self.entries[key] = _with_obstacle(entry, reason)

    def _bind(self, key: Key, value: ast.expr, place: ast.AST) -> None:
        if isinstance(value, ast.Dict):
            self._dict(key, value)
            return
        entry = self._entry(value, place)
        if key in self.entries:
            lines = f"lines {self.entries[key].line} and {entry.line}"
            entry = _with_obstacle(entry, f"it is set several times ({lines})")
        self.entries[key] = entry

    def _dict(self, key: Key, node: ast.Dict) -> None:
        self.groups.add(key)
        self.closed[key] = "it is a dict in a program"
        for name, value in zip(node.keys, node.values, strict=True):
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                self._bind((*key, name.value), value, name)

    def _entry(self, node: ast.expr, place: ast.AST) -> Entry:
        start = self._position(node.lineno, node.col_offset)
        end = self._position(node.end_lineno or 0, node.end_col_offset or 0)
        value, obstacle = _literal(node, self._text[start:end])
        line, column = getattr(place, "lineno", 1), getattr(place, "col_offset", 0)
        return Entry(
            value=value,
            start=start,
            end=end,
            key_start=self._position(line, column),
            line=node.lineno,
            obstacle=obstacle,
        )

    def _position(self, line: int, utf8_column: int) -> int:
        """Turn a place as ``ast`` gives it, in bytes of UTF-8, into a place in the text."""
        before = self._lines[line - 1].encode()[:utf8_column]
        return self._starts[line - 1] + len(before.decode())


def _group_of(name: str, node: ast.Call) -> Key:
    """Name a call; an argument of a command line is named by itself."""
    first = node.args[0] if node.args else None
    if name == "add_argument" and isinstance(first, ast.Constant) and isinstance(first.value, str):
        return (name, first.value.lstrip("-").replace("-", "_"))
    return (name,)


def _literal(node: ast.expr, source: str) -> tuple[Scalar, str]:
    """Read a literal, or say that it is none."""
    shown = " ".join(source.split())[:_SHOWN_CHARACTERS]
    try:
        value = ast.literal_eval(node)
    except ValueError:
        # What a call is given is noted with the call.
        calls = any(isinstance(each, ast.Call) for each in ast.walk(node))
        return "=" if calls else f"={source}", f"it is computed, as {shown}"
    if value is None or isinstance(value, (str, int, float, bool)):
        return value, ""
    return f"={source}", f"it is no single value, but {shown}"


def _with_obstacle(entry: Entry, obstacle: str) -> Entry:
    return Entry(
        value=entry.value,
        start=entry.start,
        end=entry.end,
        key_start=entry.key_start,
        line=entry.line,
        obstacle=obstacle,
    )
