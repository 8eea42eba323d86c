"""Finds where the representations of samples end: modules that treat the rows they get apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from memfit.analysis.alignment import RecordingsDifferError
from memfit.analysis.flow import Kind
from memfit.analysis.judgement import judge
from memfit.analysis.layouts import one_path
from memfit.analysis.separability import Culprit, Separability, not_known, refuted
from memfit.analysis.use import Sizes
from memfit.analysis.walk import Followed
from memfit.errors import MemfitError
from memfit.job import Job
from memfit.separation.called_alone import RecordedCall, followed_rows, record_call
from memfit.separation.recording_scope import no_gradients, undisturbed, watched
from memfit.separation.step_ends import reached_tensors
from memfit.session.batches import BatchLayout, shapes_of
from memfit.session.borrowing import borrowed_to_record
from memfit.session.session import Session, open_session
from memfit.virtual.tensors import ValuesNeededError, as_virtual, virtual_tensors

_MOST_LEVELS = 3
"""How deep below the model modules are looked for."""


@dataclass(slots=True)
class _CallSeen:
    """A call of a module, as the loss makes it: arguments, and how many rows they have."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def find_representations(
    job: Job, layout: BatchLayout, judge: Callable[[str], Separability]
) -> tuple[str, ...]:
    """Name the outermost modules whose rows do not depend on one another, in forward and backward.

    Every call that the loss makes of such a module is recorded by itself, at two numbers of rows,
    and followed row by row. Modules without parameters are passed over.

    Args:
        job: whose loss calls the modules.
        layout: of its batches.
        judge: says of a module, by its name, whether its rows are apart.

    Returns:
        Names of modules, ``""`` for the model itself; empty if there are none, or if the step
        cannot be recorded.
    """
    found: list[str] = []
    refused: tuple[str, ...] = ("",)
    for level in range(_MOST_LEVELS):
        candidates = list(_candidates(job, layout, refused, level))
        judged = {name: judge(name).is_proved for name in candidates}
        found += [name for name, is_apart in judged.items() if is_apart]
        refused = tuple(name for name, is_apart in judged.items() if not is_apart)
        if not refused:
            break
    return tuple(found)


def _candidates(
    job: Job, layout: BatchLayout, parents: tuple[str, ...], level: int
) -> Iterator[str]:
    """Yield the model itself at first, then the children of what was refused."""
    if level == 0:
        yield ""
        return
    with undisturbed(), virtual_tensors() as mode, borrowed_to_record(job, mode) as borrowed_job:
        model = open_session(borrowed_job, "cpu", layout, no_gradients).model
        for parent in parents:
            for name, child in model.get_submodule(parent).named_children():
                if any(True for _ in child.parameters()):
                    yield f"{parent}.{name}" if parent else name


def rows_are_apart(job: Job, layout: BatchLayout, name: str) -> Separability:
    """Return whether each row of a module's results depends on one row of its arguments.

    Args:
        job: whose loss calls the module.
        layout: of its batches.
        name: of the module, ``""`` for the model itself.
    """
    size = job.batch_size
    other = max(2, size // 2) if size > 3 else size + 1
    try:
        with undisturbed():
            wholes, parts = (_recorded(job, layout, name, each) for each in (size, other))
    except MemfitError as error:
        return not_known(f"{name or 'the model'} cannot be recorded: {error}")
    except Exception as error:  # noqa: BLE001 - whatever the job's code may raise
        return not_known(f"{name or 'the model'} cannot be recorded: {error}")
    if not wholes or len(wholes) != len(parts):
        return not_known(f"{name or 'the model'} is not called alike at every batch size")
    found = [_compared(one, two, size) for one, two in zip(wholes, parts, strict=True)]
    return next((each for each in found if not each.is_proved), found[0])


def _compared(whole: RecordedCall, part: RecordedCall, batch_size: int) -> Separability:
    if len(whole.inputs) != len(part.inputs):
        return not_known("it is not called with as many tensors at every batch size")
    found = _rows(whole, part, batch_size)
    if found is None:
        return not_known("its arguments have no rows of their own")
    sizes, dims = found
    try:
        followed = followed_rows(whole, part, sizes, dims)
    except RecordingsDifferError as error:
        return refuted(f"it does something else for other numbers of rows: {error.culprit.place()}")
    for number in whole.gradients_of_inputs:
        if (problem := followed.flows[number].problem) is not None:
            return refuted(f"{problem.culprit.place()} {problem.sentence}", problem.culprit)
    judged = judge(followed, whole.ends, part.ends, sizes)
    changed = _judged_changes(followed, whole, part) if judged.is_proved else None
    return changed or judged


def _judged_changes(
    followed: Followed, whole: RecordedCall, part: RecordedCall
) -> Separability | None:
    """Say why pieces may not leave what the whole call leaves; None if they do."""
    others = {each.full_name: each.evidence for each in part.changes}
    for change in whole.changes:
        name = change.full_name
        flow = followed.flows.get(whole.bound.get(name, -1))
        is_alike = bool(change.evidence) and change.evidence == others.get(name)
        if is_alike or (flow is not None and flow.kind is Kind.FREE and flow.is_plain):
            continue
        if flow is None or flow.kind is Kind.UNKNOWN:
            return not_known(f"what it leaves in {name} may depend on them.")
        left = f"what it leaves in {name} depends on them"
        return refuted(f"{left}.", Culprit(operator=left))
    return None


def _rows(
    whole: RecordedCall, part: RecordedCall, batch_size: int
) -> tuple[Sizes, dict[int, int | None]] | None:
    """Find the rows of a call's arguments: how many at both sizes, and where in each tensor.

    Returns:
        None if there are none, or if they are not where calls are cut.
    """
    dims: dict[int, int | None] = {}
    counts: set[tuple[int, int]] = set()
    for one, two in zip(whole.inputs, part.inputs, strict=True):
        size, other = whole.dataflow.shapes[one].sizes, part.dataflow.shapes[two].sizes
        if size == other:
            dims[one] = None
            continue
        dim = _dim_that_is_cut(size, batch_size)
        differing = [n for n, pair in enumerate(zip(size, other, strict=False)) if len({*pair}) > 1]
        if len(size) != len(other) or differing != [dim]:
            return None
        dims[one] = differing[0]
        counts.add((size[differing[0]], other[differing[0]]))
    if len(counts) != 1 or len({*dims.values()} - {None}) != 1:
        return None
    sizes = Sizes(*counts.pop())
    without = [whole.dataflow.shapes[one].sizes for one, dim in dims.items() if dim is None]
    if any(size and size[0] == sizes.first for size in without):
        return None  # it would be taken for rows
    return sizes, dims


def _dim_that_is_cut(shape: tuple[int, ...], batch_size: int) -> int | None:
    """Say where calls of a module are cut: in front, else in the first dimension of the batch."""
    if shape and shape[0] % batch_size == 0:
        return 0
    return shape.index(batch_size) if batch_size in shape else None


def _recorded(job: Job, layout: BatchLayout, name: str, batch_size: int) -> list[RecordedCall]:
    """Record every call of a module at a batch size, each by itself."""
    shapes = shapes_of(job, batch_size)

    def recorded(*, disguised: bool) -> list[RecordedCall]:
        with (
            virtual_tensors(disguised=disguised) as mode,
            borrowed_to_record(job, mode) as borrowed_job,
        ):
            batch = as_virtual(mode, shapes)
            session = open_session(borrowed_job, "cpu", layout, no_gradients)
            with _calls_of(session.model.get_submodule(name)) as calls, one_path():
                session.loss_of(batch)
            share = batch_size / job.batch_size
            return [_alone(session, job, name, call, share) for call in calls]

    try:
        return recorded(disguised=True)
    except ValuesNeededError:
        return recorded(disguised=False)


@contextmanager
def _calls_of(module: torch.nn.Module) -> Iterator[list[_CallSeen]]:
    """Collect a module's calls, with arguments cut off from what made them."""
    calls: list[_CallSeen] = []

    def note(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            calls.append(_CallSeen(_cut_off(args), _cut_off(kwargs)))

    handle = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def _cut_off(values: Any) -> Any:
    leaves, spec = tree_flatten(values)
    cut = [
        leaf.detach().clone().requires_grad_(leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in leaves
    ]
    return tree_unflatten(cut, spec)


def _alone(session: Session, job: Job, name: str, call: _CallSeen, share: float) -> RecordedCall:
    """Record one call of a module by itself."""
    module = session.model.get_submodule(name)
    given = [
        leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, torch.Tensor)
    ]
    named = dict(module.named_parameters())
    state = watched(session, job)
    lasting = {**named, **dict(module.named_buffers()), **dict(reached_tensors(state))}
    return record_call(
        lambda: module(*call.args, **call.kwargs),
        given,
        lasting,
        lambda _: named,
        share,
        code=module,
        state=state,
    )


__all__ = ["find_representations", "rows_are_apart"]
