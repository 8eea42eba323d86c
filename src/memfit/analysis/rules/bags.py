"""Bags of rows of a table, as many for each sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.analysis.flow import Axis, Flow, Kind, samples_along, sum_over_batch
from memfit.analysis.rules.indexing import plain_index
from memfit.analysis.use import CoupledError, NotFollowedError, Use

_OWN = Axis()


def summed_in_bags(use: Use) -> list[Flow]:
    """Add up the rows of each sample, or take their mean or maximum."""
    table, index = use.known("weight", "indices")
    if table.kind is not Kind.FREE or not table.is_plain or use.argument("include_last_offset"):
        raise NotFollowedError("gathers bags in a way that is not followed")
    _check_bags(use, index)
    made = Flow(kind=Kind.EACH, axes=(_OWN, None), is_drawn=index.is_drawn)
    others = [samples_along(use.varying_axes(result), index) for result in use.call.results[1:]]
    return [made, *map(use.opaque, others)]


def summed_in_bags_back(use: Use) -> list[Flow]:
    """Add the gradients of bags to their table's."""
    gradient, index = use.known("grad", "indices")
    _check_bags(use, index)
    axis = gradient.axes[0]
    if gradient.kind is not Kind.EACH or axis is None or not axis.matches(_OWN):
        raise CoupledError("brings samples together with other samples of the batch")
    return [sum_over_batch(len(use.result_size()), gradient.ratio, gradient, index)]


def _check_bags(use: Use, index: Flow) -> None:
    """Check that each bag holds the numbers of one sample, and all of them.

    Raises:
        CoupledError: if numbers depend on the batch, or on all of its rows.
        NotFollowedError: if bags begin elsewhere, or rows are weighted.
    """
    plain_index(index)
    bags = use.flow("offsets")
    axis = index.axes[0] if len(index.axes) == 1 else None
    if index.is_positions:
        raise CoupledError("uses the positions of samples in the batch")
    if use.argument("scale_grad_by_freq"):
        raise CoupledError("scales gradients by how often a row is looked up in the whole batch")
    has_bags = bags is not None and bags.is_positions and bags.axes == (_OWN,)
    if bags is None or not has_bags or axis is None or use.argument("per_sample_weights"):
        raise NotFollowedError("gathers bags in a way that is not followed")
    if not axis.matches(Axis(inner=bags.stride)):
        raise CoupledError("gathers bags that begin at other rows than their samples")


RULES: Mapping[str, Any] = {
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), summed_in_bags),
    "_embedding_bag_backward": summed_in_bags_back,
}
