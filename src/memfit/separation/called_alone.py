"""Records a call by itself, forward and backward, and follows the rows that it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memfit.analysis.dataflow import Dataflow, DataflowRecorder
from memfit.analysis.flow import Axis, Flow, Kind
from memfit.analysis.judgement import Ends
from memfit.analysis.layouts import one_path
from memfit.analysis.use import Sizes
from memfit.analysis.walk import Followed, follow
from memfit.live_state import Change, ChangeKind, LiveState
from memfit.separation.recording_scope import generators_in
from memfit.separation.step_ends import bound_tensors

_Found = Callable[[Sequence[torch.Tensor]], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call by itself: forward, a mean over its results, and backward."""

    dataflow: Dataflow
    inputs: tuple[int, ...]
    results: tuple[int, ...]
    begins: tuple[int, ...]
    lasting: dict[int, str]
    ends: Ends
    gradients_of_inputs: tuple[int, ...]
    changes: tuple[Change, ...] = ()
    """What of Python's objects the call has changed, where that was watched."""
    bound: Mapping[str, int] = field(default_factory=dict)
    """Tensors that names have been set to, by their numbers."""


def record_call(
    call: Callable[[], Any],
    given: Sequence[torch.Tensor],
    lasting: Mapping[str, torch.Tensor],
    parameters: _Found,
    share: float,
    *,
    code: object,
    state: LiveState | None = None,
) -> RecordedCall:
    """Record a call on fake tensors.

    Args:
        call: gives a tree of tensors.
        given: the tensors that it is called with.
        lasting: those that outlive it, by name.
        parameters: results to the tensors that they were computed with and are trained.
        share: of the rows that the call has, which weights the mean.
        code: of others, which the call leads to and whose generators outlive it.
        state: live, that the call may change; None watches none.
    """
    recorder = DataflowRecorder(torch.nn.Module(), generators_in(LiveState({"code": code})))
    before = None if state is None else state.snapshot()
    with recorder, one_path():
        inputs = tuple(recorder.number_of(tensor) for tensor in given)
        names = {recorder.number_of(tensor): key for key, tensor in lasting.items()}
        begins = tuple(recorder.flow.foreign)
        out = call()
        # A dictionary of another library is none to pytree.
        leaves = tree_leaves(dict(out) if isinstance(out, dict) else out)
        results = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        trained = [leaf for leaf in results if leaf.requires_grad]
        numeric = trained or [leaf for leaf in results if leaf.is_floating_point()]
        loss = sum((leaf * leaf).mean() for leaf in numeric)
        assert isinstance(loss, torch.Tensor), "there are results that can be differentiated"
        named = {key: each for key, each in parameters(results).items() if each.requires_grad}
        wanted = [*named.values(), *(each for each in given if each.requires_grad)]
        gradients = (
            torch.autograd.grad(
                loss * share,
                wanted,
                retain_graph=True,  # what was computed before the call is gone back through later
                allow_unused=True,
            )
            if trained
            else ()
        )
    numbers = [None if each is None else recorder.number_of(each) for each in gradients]
    changes = tuple(filter(_outside_operators, before.changes())) if before else ()
    of_named = zip(named, numbers, strict=False)
    return RecordedCall(
        recorder.flow,
        inputs,
        tuple(recorder.number_of(each) for each in results),
        begins,
        names,
        Ends(
            loss=recorder.number_of(loss),
            gradients={key: number for key, number in of_named if number is not None},
        ),
        tuple(number for number in numbers[len(named) :] if number is not None),
        changes,
        {} if state is None else bound_tensors(recorder, state, changes),
    )


def _outside_operators(change: Change) -> bool:
    """Return whether a change is followed by no operator: what torch writes and draws is."""
    is_torchs = change.kind is ChangeKind.GENERATOR and change.owner == "torch"
    return change.kind is not ChangeKind.TENSOR and not is_torchs


def followed_rows(
    whole: RecordedCall, part: RecordedCall, sizes: Sizes, dims: Mapping[int, int | None]
) -> Followed:
    """Follow the rows of a call recorded at two numbers of rows.

    Args:
        whole: with more rows.
        part: with fewer.
        sizes: how many.
        dims: where the rows of each input lie, by its number; None for one without.

    Raises:
        RecordingsDifferError: if the recordings part.
    """
    known: dict[int, Flow | None] = dict.fromkeys(whole.begins)
    for number, row_dim in dims.items():
        num_dims = len(whole.dataflow.shapes[number].sizes)
        axes = tuple(Axis() if dim == row_dim else None for dim in range(num_dims))
        known[number] = Flow(kind=Kind.FREE if row_dim is None else Kind.EACH, axes=axes)
    return follow((whole.dataflow, part.dataflow), sizes, known, whole.lasting)
