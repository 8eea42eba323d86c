"""Names what a recorded step begins with and where it ends: batch, state, loss and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_unflatten

from memfit.analysis.dataflow import DataflowRecorder
from memfit.analysis.judgement import Ends
from memfit.job import Total
from memfit.live_state import Change, ChangeKind, LiveState
from memfit.session.batches import BatchLayout
from memfit.session.leaves import leaves_of
from memfit.session.session import Session


def cut_batch(layout: BatchLayout, whole: Any, part: Any) -> Any:
    """Return a part of a batch as cutting it does: what has no samples is the whole batch's own."""
    leaves, others = leaves_of(whole), leaves_of(part)
    if len(leaves) != len(others) or len(leaves) != len(layout.dims):
        return part
    found = [
        leaf if place is None else other
        for leaf, other, place in zip(leaves, others, layout.dims, strict=True)
    ]
    return tree_unflatten(found, layout.spec)


def lasting_tensors(session: Session) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that outlive a step, by name."""
    yield from session.model.named_parameters()
    yield from session.model.named_buffers()


def reached_tensors(state: LiveState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor that the job's code can reach, by name."""
    for found in state.found():
        yield from ((place.text, tensor) for tensor, place, _ in found.tensors)


def bound_tensors(
    recorder: DataflowRecorder, state: LiveState, changes: tuple[Change, ...]
) -> dict[str, int]:
    """Number the tensors that names have been set to in the step."""
    names = {change.full_name for change in changes if change.kind is ChangeKind.BINDING}
    if not names:
        return {}
    found = dict(reached_tensors(state))
    met = {name: found[name] for name in names if name in found}
    return {name: recorder.number_of(each) for name, each in met.items() if recorder.knows(each)}


def is_batch_norm(module: torch.nn.Module) -> bool:
    """Return whether a module normalises by statistics of its batch, as torch's own classes do.

    A subclass with a forward of its own may do anything else beside.
    """
    kind = type(module)
    return isinstance(module, _BatchNorm) and module.training and kind.forward in _FORWARDS


_FORWARDS = (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward)


def batch_norms_of(model: torch.nn.Module) -> frozenset[str]:
    """Name such modules inside a model whose forward nobody has replaced."""
    named = ((name, each) for name, each in model.named_modules() if name and is_batch_norm(each))
    return frozenset(name for name, each in named if "forward" not in vars(each))


def hooked_parameter(model: torch.nn.Module) -> str:
    """Name a parameter whose hook would be called with the gradients of a few pieces."""
    named = model.named_parameters()
    return next((name for name, each in named if each._post_accumulate_grad_hooks), "")


def ends_of(recorder: DataflowRecorder, session: Session, loss: torch.Tensor | Total) -> Ends:
    """Say where loss and gradients lie in the recording."""
    parameters = dict(session.model.named_parameters())
    names = {id(parameter) for parameter in parameters.values()}
    for group in session.optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                parameters[f"a parameter of the optimizer, shape {tuple(parameter.shape)}"] = (
                    parameter
                )
    gradients = {
        name: recorder.number_of(parameter.grad)
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }
    if not isinstance(loss, Total):
        return Ends(loss=recorder.number_of(loss), gradients=gradients)
    count: Any = loss.count
    return Ends(
        loss=recorder.number_of(loss.sum),
        gradients=gradients,
        is_total=True,
        count=recorder.number_of(count) if isinstance(count, torch.Tensor) else float(count),
    )
