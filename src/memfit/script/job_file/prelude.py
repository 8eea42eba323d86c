"""Sorts what a script does before its loop: what builds the model, and what is there for both."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

from memfit.script.job_file.facts import SeenScript
from memfit.script.job_file.loop import Level, TrainingLoop
from memfit.script.job_file.names import (
    called_name,
    read,
    read_by_all,
    root_of,
    written,
    written_by_all,
)

_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_SHOWS = {"print", "log", "logger", "logging", "tqdm", "wandb", "writer", "summary", "pprint"}
_LEAVES = (ast.Return, ast.Break, ast.Continue)


@dataclass(slots=True)
class Prelude:
    """What runs before the loop, sorted."""

    setup: list[ast.stmt] = field(default_factory=list)
    """What neither reads the model nor makes it."""
    model: list[ast.stmt] = field(default_factory=list)
    """What builds the model, in order."""
    tainted: set[str] = field(default_factory=set)
    """Names made from the model, or from what was made of it."""
    changing: set[str] = field(default_factory=set)
    """Names that loops around the training loop change."""
    of_model: list[ast.stmt] = field(default_factory=list)
    """Everything that reads the model or what was made of it."""


def sort_prelude(loop: TrainingLoop, seen: SeenScript) -> Prelude:
    """Sort the statements before the loop.

    One that leaves its function was not run, or the loop would not have been reached.

    Args:
        loop: the loop and the way to it.
        seen: what the script's own run has shown.

    Raises:
        NoJobError: if a statement cannot be sorted.
    """
    found = Prelude(changing=_changing(loop))
    for statement in _in_one_row(loop):
        if _is_left_out(statement, seen):
            continue
        if read(statement) & found.changing and not isinstance(statement, _DEFINITIONS):
            found.changing |= written(statement)
            continue
        if _is_of_model(statement, found.tainted, seen):
            found.of_model.append(statement)
            found.tainted |= written(statement)
        else:
            found.setup.append(statement)
    found.model = _needed_for_model(found.of_model, found.tainted, seen)
    return found


def without_unread(statements: Sequence[ast.stmt], used: set[str]) -> list[ast.stmt]:
    """Drop assignments of names that nothing reads, from the last to the first.

    Args:
        statements: in order.
        used: what is read after them.
    """
    kept: list[ast.stmt] = []
    used = set(used)
    for statement in reversed(statements):
        if isinstance(statement, ast.Assign) and not written(statement) & used:
            continue
        used |= read(statement)
        kept.insert(0, statement)
    return kept


def _is_of_model(statement: ast.stmt, tainted: set[str], seen: SeenScript) -> bool:
    if isinstance(statement, _DEFINITIONS):
        return False  # a function that names the model does nothing until it is called
    return bool(read(statement) & (tainted | seen.modules) or written(statement) & seen.modules)


def _is_left_out(statement: ast.stmt, seen: SeenScript) -> bool:
    """Return whether a statement has no place in a job: it was not run, or is Accelerate's."""
    if isinstance(statement, (ast.Global, ast.Nonlocal)):
        return True
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return True
    if isinstance(statement, ast.Assign) and _prepares(statement):
        return True
    if not isinstance(statement, ast.If):
        return False
    was_run = any(_was_run(each, seen) for each in (*statement.body, *statement.orelse))
    if was_run:
        return False
    leaves = any(isinstance(each, _LEAVES) for each in ast.walk(statement))
    return leaves or bool((read(statement) | written(statement)) & seen.modules)


def _was_run(statement: ast.stmt, seen: SeenScript) -> bool:
    lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
    return any(line in seen.lines for line in lines)


def _prepares(statement: ast.Assign) -> bool:
    """Return whether a statement is Accelerate's ``a, b = accelerator.prepare(a, b)``."""
    value = statement.value
    if not isinstance(value, ast.Call) or called_name(value) != "prepare":
        return False
    return written(statement) <= read_by_all(value.args)


def _in_one_row(loop: TrainingLoop) -> list[ast.stmt]:
    """Put the statements of all levels into one row, with what functions are given as assignments.

    Raises:
        NoJobError: if two functions mean different things by one name.
    """
    row: list[ast.stmt] = []
    call: ast.Call | None = None
    for number, level in enumerate(loop.levels):
        known = written_by_all(row)
        given = [] if call is None else _bindings(loop, level, call)
        own = [*given, *_own_statements(loop, level, is_file=number == 0)]
        # Imported names mean the same everywhere.
        clash = (known & written_by_all(own)) - written_by_all(
            [each for each in own if isinstance(each, (ast.Import, ast.ImportFrom))]
        )
        if clash and call is not None:
            raise loop.refuse(
                level.function, f"its name {min(clash)} means something else where it is called"
            )
        row += own
        call = level.call
    return row


def _own_statements(loop: TrainingLoop, level: Level, *, is_file: bool) -> Sequence[ast.stmt]:
    if is_file and loop.is_guarded:
        return [each for each in level.before if each not in loop.tree.body]
    return level.before


def _bindings(loop: TrainingLoop, level: Level, call: ast.Call) -> list[ast.stmt]:
    """Write what a call gives to a function's parameters as assignments.

    Raises:
        NoJobError: if the call has stars.
    """
    assert level.function is not None, "only the file has no function"
    arguments = level.function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    if any(isinstance(each, ast.Starred) for each in call.args) or any(
        each.arg is None for each in call.keywords
    ):
        raise loop.refuse(call, f"{level.function.name} is called with stars")
    given = dict(zip(names, call.args, strict=False))
    given |= {each.arg: each.value for each in call.keywords if each.arg}
    defaults = dict(zip(reversed(names), reversed(arguments.defaults), strict=False))
    defaults |= {
        each.arg: value
        for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if value is not None
    }
    return [
        _assignment(name, value, call)
        for name, value in {**defaults, **given}.items()
        if not (isinstance(value, ast.Name) and value.id == name)
    ]


def _assignment(name: str, value: ast.expr, where: ast.Call) -> ast.stmt:
    made = ast.Assign(targets=[ast.Name(id=name, ctx=ast.Store())], value=value)
    ast.copy_location(made, where)
    made.targets[0] = ast.copy_location(made.targets[0], where)
    return made


def _changing(loop: TrainingLoop) -> set[str]:
    """Return the names that loops on the way change, and what is given on from them."""
    changing: set[str] = set()
    call: ast.Call | None = None
    for level in loop.levels:
        if call is not None:
            changing |= {
                name
                for each in _bindings(loop, level, call)
                if read(each) & changing
                for name in written(each)
            }
        changing |= written_by_all(level.in_loops)
        for each in level.loops:
            if isinstance(each, ast.For):
                changing |= written(each.target)
        call = level.call
    return changing


def _needed_for_model(
    statements: Sequence[ast.stmt], tainted: set[str], seen: SeenScript
) -> list[ast.stmt]:
    """Choose the statements without which the model would be another."""
    needed = {seen.model}
    chosen: list[ast.stmt] = []
    for statement in reversed(statements):
        if written(statement) & needed:
            needed |= read(statement) & (tainted | seen.modules)
        elif not _changes_modules(statement, tainted, seen):
            continue
        chosen.insert(0, statement)
    return chosen


def _changes_modules(statement: ast.stmt, tainted: set[str], seen: SeenScript) -> bool:
    """Return whether a statement may change a module without binding its name."""
    if isinstance(statement, (*_SIMPLE, ast.Assert)) or read(statement) & tainted - seen.modules:
        return False
    if not isinstance(statement, ast.Expr):
        return True
    value = statement.value
    return not (isinstance(value, ast.Call) and root_of(value.func) in _SHOWS)
