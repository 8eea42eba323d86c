"""What becomes of samples in a loop over them: taken one by one, worked on, joined or added up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from memfit.analysis.dataflow import Ref, Role
from memfit.analysis.flow import Axis, Flow, Kind, same_ratio
from memfit.analysis.precautions import gradients_of, is_backward
from memfit.analysis.rules.pointwise import combined, sum_of
from memfit.analysis.use import CoupledError, NotFollowedError, Use
from memfit.trace.operators import draws

_OWN = Axis()


def taken(use: Use) -> list[Flow]:
    """Take each sample out of a batch."""
    (flow,) = use.known("self")
    axis = flow.axes[use.argument("dim") % len(flow.axes)]
    if flow.is_positions:
        raise CoupledError("uses the positions of samples in the batch")
    if flow.kind is not Kind.EACH or axis is None or not axis.matches(_OWN) or flow.is_opaque:
        raise NotFollowedError("takes something apart that is not laid out in samples")
    num_dims = len(use.result_size())
    return [_one(flow, num_dims)]


def _one(flow: Flow, num_dims: int) -> Flow:
    return Flow(
        kind=Kind.ONE, axes=(None,) * num_dims, ratio=flow.ratio, is_drawn=flow.is_drawn,
    )  # fmt: skip


def joined_again(use: Use) -> list[Flow]:
    """Put all samples behind one another."""
    ref = use.tensors[0]
    flow, size = use.flow_of(ref), use.size_of(ref)
    if flow.kind is not Kind.ONE or flow.is_opaque:
        raise NotFollowedError("joins something that belongs to no sample")
    num_dims = len(use.result_size())
    dim = use.argument("dim") % num_dims
    axis = Axis(inner=size[dim]) if use.name == "cat" else _OWN
    return [_each(flow, dim, axis, num_dims)]


def put_back(use: Use) -> list[Flow]:
    """Put each sample's gradient back in its place."""
    flow = use.flows[0]
    if flow.kind not in (Kind.ONE, Kind.FREE) or flow.is_opaque:
        raise NotFollowedError("gives each sample a gradient that belongs to others as well")
    num_dims = len(use.result_size())
    return [_each(flow, use.argument("dim") % num_dims, _OWN, num_dims)]


def _each(flow: Flow, dim: int, axis: Axis, num_dims: int) -> Flow:
    axes = tuple(axis if place == dim else None for place in range(num_dims))
    return Flow(kind=Kind.EACH, axes=axes, ratio=flow.ratio, is_drawn=flow.is_drawn)


def added_up(use: Use) -> list[Flow]:
    """Add up what belongs to one sample over all samples, and what belongs to none."""
    terms = [(ref, use.flow_of(ref)) for ref in use.tensors]
    terms = [each for each in terms if not each[1].is_zero] or terms
    if any(flow.is_opaque for _, flow in terms):
        raise NotFollowedError("adds up what only the backward of an operator knows")
    flows = [replace(flow, kind=Kind.SUM) if flow.kind is Kind.ONE else flow for _, flow in terms]
    if any(flow.kind is Kind.SUM for flow in flows):
        return [sum_of(use, flows)]
    if not all(same_ratio(flow.ratio, flows[0].ratio) for flow in flows):
        raise CoupledError("adds values of which only one changes with the batch size")
    return [combined(use, [ref for ref, _ in terms], flows[0].ratio)]


ROLES: Mapping[Role, Callable[[Use], list[Flow]]] = {
    Role.TAKE: taken,
    Role.JOIN: joined_again,
    Role.PLACE: put_back,
    Role.SUM: added_up,
}


def of_one_sample(use: Use, follow: Callable[[Use], list[Flow]]) -> list[Flow]:
    """Work on one sample, for which the batch does not exist.

    Args:
        use: of an operator, some of whose tensors belong to one sample.
        follow: says what comes of tensors that do not depend on the batch.

    Raises:
        NotFollowedError: if the operator is also given other samples, or draws random numbers.
    """
    if any(flow.kind not in (Kind.ONE, Kind.FREE) for flow in use.flows):
        raise NotFollowedError("combines one sample in a loop with the whole batch")
    if draws(use.call.func, use.call.arguments, {}):
        raise NotFollowedError("draws random numbers in a loop over the samples")

    def alone(ref: Ref) -> Flow:
        flow = use.flow_of(ref)
        return replace(flow, kind=Kind.FREE) if flow.kind is Kind.ONE else flow

    found: Sequence[Flow] = follow(use.seeing(alone))
    if any(flow.kind is not Kind.FREE for flow in found):
        raise NotFollowedError("gives one sample in a loop a dimension that follows the batch size")
    gradients = [use.flow_of(ref) for ref in gradients_of(use)] if is_backward(use) else []
    if any(not same_ratio(one.ratio, other.ratio) for one in found for other in gradients):
        raise NotFollowedError("changes the scale of a gradient in a way that is not known")
    is_drawn = any(flow.is_drawn for flow in use.flows)
    return [
        replace(flow, kind=Kind.ONE, is_drawn=is_drawn, sources=None, is_positions=False)
        for flow in found
    ]
