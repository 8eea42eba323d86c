"""Records a job's step operator by operator, on fake tensors, at a batch size."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from memfit.analysis.alignment import is_same_program
from memfit.analysis.dataflow import Dataflow, DataflowRecorder, refs_in
from memfit.analysis.judgement import Ends
from memfit.analysis.layouts import one_path
from memfit.job import Job, Total
from memfit.live_state import Change, ChangeKind
from memfit.separation.recording_scope import generators_in, no_gradients, watched
from memfit.separation.step_ends import (
    batch_norms_of,
    bound_tensors,
    cut_batch,
    ends_of,
    hooked_parameter,
    lasting_tensors,
    reached_tensors,
)
from memfit.session.batches import BatchLayout, shapes_of
from memfit.session.borrowing import borrowed_to_record
from memfit.session.leaves import leaves_of
from memfit.session.session import Session, open_session
from memfit.virtual.tensors import as_virtual, virtual_tensors


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step at one batch size, and where its ends lie in the recording."""

    num_samples: int
    dataflow: Dataflow
    leaves: tuple[int | None, ...]
    """Numbers of the batch's tensors."""
    lasting: dict[int, str]
    begins: tuple[int, ...]
    """Numbers of all tensors that the step begins with."""
    ends: Ends
    changes: tuple[Change, ...]
    """What of Python's objects the step has changed."""
    bound: dict[str, int]
    """Tensors that names have been set to, by their numbers."""
    hooked: str
    """A parameter with a hook on its accumulated gradient; empty if there is none."""
    batch_norms: frozenset[str]
    """Modules, by name, that batchnorm-replay stands in for."""

    @property
    def set_names(self) -> set[str]:
        """List what of Python's objects the step has set to something else."""
        return {each.full_name for each in self.changes if each.kind is not ChangeKind.GENERATOR}


def record_step(
    job: Job, layout: BatchLayout, num_samples: int, *, disguised: bool, after: int | None = None
) -> RecordedStep:
    """Record forward, loss and backward of a batch.

    Args:
        job: whose step.
        layout: of its batches.
        num_samples: of the batch.
        disguised: whether fake tensors pass for tensors with values.
        after: the size of a batch that was stepped with before; None: the step is the first.

    Raises:
        MemfitError: if the step cannot be recorded.
    """
    # Outside: a batch function that looks at values has to be run on its own tensors.
    whole = shapes_of(job, job.batch_size)
    sizes = (num_samples, *(() if after is None else (after,)))
    shapes, *earlier = [cut_batch(layout, whole, shapes_of(job, size)) for size in sizes]
    with (
        virtual_tensors(disguised=disguised) as mode,
        borrowed_to_record(job, mode) as borrowed_job,
    ):
        batch = as_virtual(mode, shapes)
        session = open_session(borrowed_job, "cpu", layout, no_gradients)
        for each in earlier:
            _step(session, as_virtual(mode, each))
        state = watched(session, job)
        recorder = DataflowRecorder(session.model, generators_in(state))
        before = state.snapshot()
        with recorder, one_path():
            leaves = tuple(
                recorder.number_of(leaf) if isinstance(leaf, torch.Tensor) else None
                for leaf in leaves_of(batch)
            )
            lasting = {
                recorder.number_of(tensor): name for name, tensor in lasting_tensors(session)
            }
            lasting |= {recorder.number_of(each): name for name, each in reached_tensors(state)}
            begins = tuple(recorder.flow.foreign)
            loss = session.loss_of(batch)
            value = loss.sum if isinstance(loss, Total) else loss * (num_samples / job.batch_size)
            value.backward()
        changes = tuple(c for c in before.changes() if c.kind is not ChangeKind.TENSOR)
        ends = ends_of(recorder, session, loss)
        bound = bound_tensors(recorder, state, changes)
        return RecordedStep(
            num_samples,
            recorder.flow,
            leaves,
            lasting,
            begins,
            ends,
            changes,
            bound,
            hooked_parameter(session.model),
            batch_norms_of(session.model),
        )


def _step(session: Session, batch: Any) -> None:
    """Run a step whose gradients are thrown away."""
    loss = session.loss_of(batch)
    (loss.sum if isinstance(loss, Total) else loss).backward()
    for group in session.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
    session.model.zero_grad(set_to_none=True)


def unread_names(names: Collection[str], first: RecordedStep, later: RecordedStep) -> set[str]:
    """Return which names a step sets to tensors without having read what they were set to before.

    Args:
        names: that every step sets.
        first: a step with the job's objects as they were built.
        later: a step of the same size after one of another size.

    Returns:
        Those names if the later step is the same as the first one, number by number, and looks at
        nothing that the step before it has left under those names; else none.
    """
    left = {
        later.dataflow.shapes[number].storage
        for number, name in later.lasting.items() if name in names
    }  # fmt: skip
    found = set(names) & set(later.lasting.values())
    touched = {
        later.dataflow.shapes[ref.number].storage
        for call in later.dataflow.calls for ref in refs_in(call.arguments)
    }  # fmt: skip
    is_same = is_same_program(
        (first.dataflow, later.dataflow), (first.lasting, later.lasting)
    )  # fmt: skip
    return found if is_same and not left & touched else set()
