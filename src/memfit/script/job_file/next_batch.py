"""Finds where a loop takes its batches with ``next(iterator)``, and what the iterator goes over."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memfit.script.job_file.loop import TrainingLoop
from memfit.script.job_file.names import called_name, root_of, written
from memfit.script.job_file.prelude import Prelude


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenByNext:
    """A statement that takes the next batch, and the loop that would give the same ones."""

    statement: ast.stmt
    header: ast.For
    begins_anew: bool
    """Whether the script makes another iterator where this one ends."""


def taken_by_next(
    loop: TrainingLoop, prelude: Prelude, statements: Sequence[ast.stmt]
) -> TakenByNext | None:
    """Find ``batch = next(iterator)``, alone or in ``try`` with ``except StopIteration``.

    Args:
        loop: the training loop.
        prelude: where the iterator is made.
        statements: of an iteration, up to the backward.

    Raises:
        NoJobError: if it cannot be said what the iterator goes over.
    """
    found = next(_taken_in(statements), None)
    if found is None:
        return None
    statement, each = found
    iterator = _iterator_of(each)
    again = [] if statement is each else _made_of(iterator, ast.walk(statement))
    source = [*_made_of(iterator, _before(prelude)), *again]
    if not source:
        raise loop.refuse(each, f"the batches come from {iterator}, not made by iter(...)")
    if len({ast.dump(value) for value in source}) > 1:
        raise loop.refuse(each, f"{iterator} goes over different things")
    header = ast.For(target=each.targets[0], iter=source[0], body=[], orelse=[])
    header = ast.copy_location(header, each)
    return TakenByNext(statement=statement, header=header, begins_anew=bool(again))


def first_line_with_batch(body: Sequence[ast.stmt]) -> int:
    """Return the line of an iteration from which on its batch is there.

    That is the first one, or the one after the batch is taken with ``next``, which draws random
    numbers for the order of the samples.
    """
    taken = next(_taken_in(body), None)
    place = 0 if taken is None else body.index(taken[0]) + 1
    return body[place].lineno if place < len(body) else body[0].lineno


def _taken_in(statements: Sequence[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.Assign]]:
    """Yield statements that take a batch, with the assignment in them."""
    for statement in statements:
        body = statement.body if isinstance(statement, ast.Try) else [statement]
        for each in body:
            if isinstance(each, ast.Assign) and _iterator_of(each):
                yield statement, each


def _iterator_of(statement: ast.stmt) -> str:
    """Return the name in ``batch = next(name)``; empty for anything else."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return ""
    value = statement.value
    if not isinstance(value, ast.Call) or called_name(value) != "next" or not value.args:
        return ""
    return value.args[0].id if isinstance(value.args[0], ast.Name) else ""


def _made_of(iterator: str, nodes: Iterator[ast.AST]) -> list[ast.expr]:
    """Return what ``iterator = iter(...)`` is given."""
    return [
        node.value.args[0]
        for node in nodes
        if isinstance(node, ast.Assign)
        and written(node) == {iterator}
        and isinstance(node.value, ast.Call)
        and root_of(node.value.func) == "iter"
        and len(node.value.args) == 1
    ]


def _before(prelude: Prelude) -> Iterator[ast.AST]:
    for statement in prelude.setup:
        yield from ast.walk(statement)
