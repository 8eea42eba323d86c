"""Cuts the loss and its batch out of the body of a training loop."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from memfit.script.job_file.facts import SeenScript
from memfit.script.job_file.loop import TrainingLoop
from memfit.script.job_file.names import (
    calls_in,
    read,
    root_of,
    written,
    written_by_all,
)
from memfit.script.job_file.next_batch import taken_by_next
from memfit.script.job_file.prelude import Prelude

_LEAVES = (ast.Return, ast.Break, ast.Continue)
_TRANSPARENT = ("accumulate", "no_sync")
_HARMLESS_TO_MODEL = ("train", "zero_grad")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The loss, and where its batch comes from."""

    statements: Sequence[ast.stmt]
    value: ast.expr
    batch_names: Sequence[str]
    header: ast.For | None
    """The loop whose targets are the batch; None where statements fetch it."""
    fetch: Sequence[ast.stmt]
    """What fetches a batch, where no loop does."""
    left_out: Sequence[ast.stmt]
    is_endless: bool = False
    """Whether the script begins anew where its batches end."""


def cut_loss(loop: TrainingLoop, prelude: Prelude, seen: SeenScript) -> Loss:
    """Choose the statements of the loop's body that the loss is made of.

    Raises:
        NoJobError: if it depends on what a job's loss cannot have.
    """
    flat = _up_to_backward(loop, loop.loop.body, list(loop.way))
    taken = taken_by_next(loop, prelude, flat)
    if taken is not None:
        flat = [each for each in flat if each is not taken.statement]
    chosen, inputs = _needed(loop, flat, read(loop.loss), seen)
    changing = prelude.changing | written(loop.loop) | written_by_all(_bodies(loop))
    _refuse_made_from_model(loop, inputs, prelude, seen)
    targets = _targets(loop)
    names = sorted(inputs & changing - seen.modules - {seen.model})
    fetch: Sequence[ast.stmt] = ()
    header: ast.For | None = None
    if taken is not None and names and set(names) <= written(taken.header.target):
        header = taken.header
        _refuse_changing(loop, read(header.iter) & changing, header)
    elif not names:
        fetch, chosen = _fetched_first(loop, chosen, seen)
        names = sorted(written_by_all(fetch) & _read(chosen, loop.loss))
    elif set(names) <= targets:
        assert isinstance(loop.loop, ast.For), "it has targets"
        header = loop.loop
        _refuse_changing(loop, read(header.iter) & changing - targets, header)
    else:
        fetch = _carried(loop, set(names), changing)
    ordered = _in_order(names, header, fetch)
    kept = {id(each) for each in (*chosen, *fetch, *([taken.statement] if taken else ()))}
    left = [each for each in _all_of(loop) if id(each) not in kept and not _is_update(each)]
    return Loss(
        statements=chosen,
        value=loop.loss,
        batch_names=ordered,
        header=header,
        fetch=fetch,
        left_out=left,
        is_endless=taken is not None and header is taken.header and taken.begins_anew,
    )


def _up_to_backward(
    loop: TrainingLoop, block: Sequence[ast.stmt], way: list[ast.stmt]
) -> list[ast.stmt]:
    """Return what runs before the backward in an iteration, with transparent blocks opened."""
    here = way[0]
    before = list(block[: block.index(here)])
    if len(way) == 1:
        if not isinstance(here, (ast.Expr, ast.Assign)):
            raise loop.refuse(here, "the backward is part of another statement")
        return before
    if not isinstance(here, ast.With):
        raise loop.refuse(here, f"the backward stands inside `{type(here).__name__.lower()}`")
    inner = _up_to_backward(loop, here.body, way[1:])
    if all(calls_in(item.context_expr, *_TRANSPARENT) for item in here.items):
        return [*before, *inner]
    if "autocast" not in ast.unparse(here.items[0]):
        raise loop.refuse(here, f"the backward stands inside `with {ast.unparse(here.items[0])}`")
    around = ast.copy_location(ast.With(items=here.items, body=inner), here)
    return [*before, around]


def _needed(
    loop: TrainingLoop, statements: Sequence[ast.stmt], needed: set[str], seen: SeenScript
) -> tuple[list[ast.stmt], set[str]]:
    """Choose backwards what gives the needed names; return it with the names it begins from."""
    needed = set(needed)
    chosen: list[ast.stmt] = []
    inner = written_by_all(statements) | _targets(loop)
    for statement in reversed(statements):
        if not _gives(loop, statement, needed, inner, seen):
            continue
        if any(isinstance(each, _LEAVES) for each in ast.walk(statement)):
            raise loop.refuse(statement, "the loss depends on a statement that leaves the loop")
        needed = _before(loop, statement, needed, seen)
        chosen.insert(0, statement)
    return chosen, needed


def _before(
    loop: TrainingLoop, statement: ast.stmt, needed: set[str], seen: SeenScript
) -> set[str]:
    """Return what is needed before a statement, so that the names are there after it."""
    if isinstance(statement, ast.With):
        _, inside = _needed(loop, statement.body, needed, seen)
        return inside | read(ast.Tuple(elts=[each.context_expr for each in statement.items]))
    if isinstance(statement, ast.For):
        _, inside = _needed(loop, statement.body, needed, seen)
        return (inside - written(statement.target)) | needed | read(statement.iter)
    plain = isinstance(statement, ast.Assign) and all(
        isinstance(each, (ast.Name, ast.Tuple)) for each in statement.targets
    )
    return (needed - written(statement) if plain else needed) | read(statement)


def _gives(
    loop: TrainingLoop,
    statement: ast.stmt,
    needed: set[str],
    inner: set[str],
    seen: SeenScript,
) -> bool:
    """Return whether a statement gives or changes a needed name.

    Raises:
        NoJobError: if it changes the model.
    """
    if written(statement) & needed:
        if written(statement) & seen.modules:
            raise loop.refuse(statement, "the loop changes the model")
        return True
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    call = statement.value
    if not isinstance(call.func, ast.Attribute):
        return False
    root = root_of(call.func)
    if root in seen.modules and call.func.attr not in _HARMLESS_TO_MODEL:
        raise loop.refuse(statement, f"the loop calls {ast.unparse(call.func)}")
    return root in needed & inner - seen.modules


def _refuse_made_from_model(
    loop: TrainingLoop, inputs: set[str], prelude: Prelude, seen: SeenScript
) -> None:
    """Refuse what the loss reads besides the model, the batch and what stays as it is."""
    made = inputs & prelude.tainted - seen.modules
    if made:
        raise loop.refuse(loop.backward, f"the loss reads {min(made)}, which is made of the model")
    outside = inputs & set(seen.tensors_outside)
    outside -= seen.modules | _targets(loop) | written_by_all(_bodies(loop))
    if outside:
        name = min(outside)
        raise loop.refuse(
            loop.backward,
            f"the loss reads {name}, {seen.tensors_outside[name]} with tensors outside the model",
            "Make it part of the model, or of the batch.",
        )
    others = inputs & seen.modules - {seen.model}
    if others:
        raise loop.refuse(loop.backward, f"the loss reads {min(others)} beside {seen.model}")


def _refuse_changing(loop: TrainingLoop, names: set[str], node: ast.AST) -> None:
    if names:
        raise loop.refuse(
            node, f"the batches depend on {min(names)}, which changes from step to step"
        )


def _fetched_first(
    loop: TrainingLoop, chosen: list[ast.stmt], seen: SeenScript
) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Cut the statements that come before the first use of the model off as the batch."""
    end = next((i for i, each in enumerate(chosen) if read(each) & seen.modules), 0)
    if end == 0:
        raise loop.refuse(loop.loop, "nothing in the loop gives the loss a batch")
    return chosen[:end], chosen[end:]


def _carried(loop: TrainingLoop, names: set[str], changing: set[str]) -> list[ast.stmt]:
    """Find the one statement that fetches the next batch for a later iteration.

    Raises:
        NoJobError: if the names come from elsewhere.
    """
    for statement in loop.loop.body:
        gives = written(statement)
        if names <= gives and isinstance(statement, ast.Assign):
            _refuse_changing(loop, read(statement) & changing, statement)
            return [statement]
    name = min(names - _targets(loop))
    raise loop.refuse(loop.backward, f"the loss reads {name}, which changes from step to step")


def _in_order(
    names: Sequence[str], header: ast.For | None, fetch: Sequence[ast.stmt]
) -> Sequence[str]:
    """Order names as the script writes them."""
    nodes: list[ast.AST] = [header.target] if header else list(fetch)
    written_names = [
        each.id
        for node in nodes
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    ]
    return sorted(names, key=written_names.index)


def _targets(loop: TrainingLoop) -> set[str]:
    return written(loop.loop.target) if isinstance(loop.loop, ast.For) else set()


def _bodies(loop: TrainingLoop) -> Sequence[ast.stmt]:
    return (loop.whole,)


def _read(statements: Sequence[ast.stmt], *others: ast.AST) -> set[str]:
    return set().union(*(read(each) for each in (*statements, *others)))


def _all_of(loop: TrainingLoop) -> Sequence[ast.stmt]:
    """Return the statements of an iteration, with what stands around the backward opened."""
    found: list[ast.stmt] = []
    block: Sequence[ast.stmt] = loop.loop.body
    for node in loop.way:
        found += [each for each in block if each is not node]
        block = getattr(node, "body", [])
    for around in (*loop.levels[-1].loops,):
        found += [each for each in getattr(around, "body", []) if not _holds(each, loop.loop)]
    return sorted(found, key=lambda each: each.lineno)


def _holds(statement: ast.stmt, wanted: ast.AST) -> bool:
    return any(each is wanted for each in ast.walk(statement))


def _is_update(statement: ast.stmt) -> bool:
    """Return whether a statement is part of the update, which ``run.step`` does."""
    own = ("step", "zero_grad", "clip_grad_norm_", "unscale_", "backward")
    if isinstance(statement, ast.If):
        return all(_is_update(each) for each in (*statement.body, *statement.orelse))
    if not isinstance(statement, (ast.Expr, ast.Assign)):
        return False
    text = ast.unparse(statement)
    is_scaler = text.startswith("scaler.")
    return (bool(calls_in(statement, *own)) and "sched" not in text) or is_scaler
