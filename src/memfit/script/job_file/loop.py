"""Finds the training loop in the text of a script: where it is, and what comes before it."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from memfit.errors import MemfitError
from memfit.script.job_file.names import called_name, calls_in, root_of

_LOOPS = (ast.For, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class NoJobError(MemfitError):
    """Say what of a script cannot be turned into a job, at which line, and what to do instead."""

    def __init__(self, script: str, line: int | None, reason: str, remedy: str) -> None:
        self.line, self.reason, self.remedy = line, reason, remedy
        where = script if line is None else f"{script}, line {line}"
        super().__init__(f"No job can be written from {where}: {reason}. {remedy}")


CUT_BY_HAND = (
    "Write the four functions of a memfit.Job by hand (docs/start.md), or predict the script as "
    "it is: memfit predict"
)


@dataclass(frozen=True, slots=True)
class Level:
    """One function on the way from the file to the loop, or the file itself."""

    function: ast.FunctionDef | None
    before: Sequence[ast.stmt]
    """What runs before the way goes on, in order; bodies of loops on the way are not part of it."""
    in_loops: Sequence[ast.stmt]
    """What runs before it inside loops on the way: once for each epoch."""
    loops: Sequence[ast.stmt]
    call: ast.Call | None = None
    """What calls the next level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLoop:
    """The innermost loop around the one backward of a script."""

    script: Path
    source: str
    tree: ast.Module
    levels: Sequence[Level]
    """From the file to the function with the loop."""
    loop: ast.For | ast.While
    backward: ast.Call
    way: Sequence[ast.stmt] = field(default_factory=tuple)
    """What stands around the backward inside the loop, from outside, its own statement last."""
    is_guarded: bool = False
    """Whether the file trains only where it is the main program, and can be imported."""

    def refuse(self, node: ast.AST | None, reason: str, remedy: str = "") -> NoJobError:
        """Make the error for something at a node of the script."""
        line = getattr(node, "lineno", None)
        return NoJobError(self.script.name, line, reason, remedy or f"{CUT_BY_HAND}.")

    @property
    def loss(self) -> ast.expr:
        """Return what is differentiated, without a scaler around it.

        Raises:
            NoJobError: if the backward is called in another way.
        """
        function = self.backward.func
        assert isinstance(function, ast.Attribute), "found by its attribute"
        if self.backward.args:  # accelerator.backward(loss)
            return self.backward.args[0]
        value = function.value
        if isinstance(value, ast.Call) and called_name(value) == "scale" and value.args:
            return value.args[0]
        return value

    @property
    def whole(self) -> ast.stmt:
        """Return the outermost loop of the function around the training loop."""
        loops = self.levels[-1].loops
        return loops[0] if loops else self.loop


def find_training_loop(script: Path) -> TrainingLoop:
    """Read a script and find the loop that trains.

    Raises:
        NoJobError: if there is none, or more than one, or one that a job cannot be cut out of.
    """
    source = script.read_text(encoding="utf-8")
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise NoJobError(script.name, error.lineno, "it is no Python", "Correct it.") from error
    backward = _the_backward(script, tree)
    path = _path_to(tree, backward)
    levels = [_level(path, None)]
    inner = path
    while (name := _function_on(path)) is not None:
        call = _the_call(script, tree, name)
        path = _path_to(tree, call)
        levels[0:0] = [_level(path, call)]
        if len(levels) > 8:
            raise NoJobError(script.name, call.lineno, "functions call each other", CUT_BY_HAND)
    loops = [node for node in _after_function(inner) if isinstance(node, _LOOPS)]
    if not loops:
        raise NoJobError(
            script.name,
            backward.lineno,
            f"the backward is in the function {name_of(inner)}, and the loop that calls it is not "
            "around it",
            f"Move the backward into the loop. {CUT_BY_HAND}.",
        )
    loop = loops[-1]
    return TrainingLoop(
        script=script,
        source=source,
        tree=tree,
        levels=levels,
        loop=loop,
        backward=backward,
        way=[node for node in inner[inner.index(loop) + 1 :] if isinstance(node, ast.stmt)],
        is_guarded=any(_is_guard(node) for node in path),
    )


def name_of(path: Sequence[ast.AST]) -> str:
    """Return the name of the innermost function on a path."""
    function = _function_on(path)
    return function.name if function else "the script"


def _the_backward(script: Path, tree: ast.Module) -> ast.Call:
    found = [call for call in calls_in(tree, "backward") if isinstance(call.func, ast.Attribute)]
    closures = [call for call in calls_in(tree, "step") if call.args and _is_closure(tree, call)]
    if closures:
        raise NoJobError(
            script.name, closures[0].lineno, "the optimizer calls a closure", f"{CUT_BY_HAND}."
        )
    if len(found) == 1:
        return found[0]
    if found:
        lines = ", ".join(str(call.lineno) for call in found)
        raise NoJobError(
            script.name,
            found[1].lineno,
            f"there are {len(found)} calls of backward (lines {lines}), and a job has one loss and "
            "one optimizer",
            f"{CUT_BY_HAND}.",
        )
    raise NoJobError(script.name, None, *_without_loop(tree))


def _without_loop(tree: ast.Module) -> tuple[str, str]:
    """Say why a script has no backward of its own, and which door it has."""
    imported = {
        alias.name.partition(".")[0] if isinstance(node, ast.Import) else (node.module or "")
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    roots = {name.partition(".")[0] for name in imported}
    if roots & {"lightning", "pytorch_lightning"}:
        return (
            "Lightning's Trainer has the loop",
            (
                "Predict it as it is (memfit predict), or give memfit the Trainer and the module: "
                "docs/out-of-memory.md, A framework's trainer."
            ),
        )
    if "transformers" in roots and "Trainer" in {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name)
    }:
        return (
            "transformers' Trainer has the loop",
            (
                "Predict it as it is (memfit predict), and write the plan into TrainingArguments: "
                "docs/out-of-memory.md, A framework's trainer."
            ),
        )
    return "it never calls backward itself", f"{CUT_BY_HAND}."


def _is_closure(tree: ast.Module, call: ast.Call) -> bool:
    """Return whether ``step`` is given a function: of the file, or a lambda."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)}
    first = call.args[0]
    return isinstance(first, ast.Lambda) or root_of(first) in names


def _the_call(script: Path, tree: ast.Module, function: ast.FunctionDef) -> ast.Call:
    found = [call for call in calls_in(tree, function.name) if isinstance(call.func, ast.Name)]
    if len(found) == 1:
        return found[0]
    classes = (each for each in ast.walk(tree) if isinstance(each, ast.ClassDef))
    owner = next((each for each in classes if function in each.body), None)
    if owner is not None:
        reason = f"the training step is a method, {owner.name}.{function.name}"
        raise NoJobError(script.name, function.lineno, reason, f"{CUT_BY_HAND}.")
    reason = (
        f"the loop is in {function.name}, which is called {len(found)} times"
        if found
        else f"the loop is in {function.name}, which the file does not call by its name"
    )
    raise NoJobError(script.name, function.lineno, reason, f"{CUT_BY_HAND}.")


def _path_to(tree: ast.Module, wanted: ast.AST) -> list[ast.AST]:
    """Return the nodes from the file to a node, both included."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    path = [wanted]
    while path[0] in parents:
        path.insert(0, parents[path[0]])
    return path


def _function_on(path: Sequence[ast.AST]) -> ast.FunctionDef | None:
    found = [node for node in path if isinstance(node, ast.FunctionDef)]
    return found[-1] if found else None


def _after_function(path: Sequence[ast.AST]) -> Sequence[ast.AST]:
    function = _function_on(path)
    return path if function is None else path[path.index(function) + 1 :]


def _level(path: Sequence[ast.AST], call: ast.Call | None) -> Level:
    """Gather what runs in one function before the way leads out of it, or to the loop's body."""
    function = _function_on(path)
    inside = [node for node in _after_function(path) if isinstance(node, ast.stmt)]
    owner: ast.AST = function or path[0]
    before: list[ast.stmt] = []
    in_loops: list[ast.stmt] = []
    loops: list[ast.stmt] = []
    last_loop = max((i for i, node in enumerate(inside) if isinstance(node, _LOOPS)), default=-1)
    end = last_loop if call is None else len(inside) - 1
    for node in inside[: end + 1]:
        (in_loops if loops else before).extend(_statements_before(owner, node))
        if isinstance(node, _LOOPS) and node is not inside[end]:
            loops.append(node)
        elif isinstance(node, _LOOPS) and call is None:
            break
        elif isinstance(node, _LOOPS):
            loops.append(node)
        owner = node
    return Level(function, before, in_loops, loops, call)


def _statements_before(owner: ast.AST, node: ast.stmt) -> Sequence[ast.stmt]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(owner, name, [])
        if isinstance(block, list) and node in block:
            return block[: block.index(node)]
    return []


def _is_guard(node: ast.AST) -> bool:
    """Return whether a node is ``if __name__ == "__main__":``."""
    return isinstance(node, ast.If) and any(
        isinstance(each, ast.Name) and each.id == "__name__" for each in ast.walk(node.test)
    )
