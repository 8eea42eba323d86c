"""Losses in one operator, with the reduction inside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memfit.analysis.flow import Flow, Kind, samples_along, sum_over_batch
from memfit.analysis.rules.pointwise import aligned, combined
from memfit.analysis.use import CoupledError, NotFollowedError, Use

_NONE, _MEAN, _SUM = 0, 1, 2
"""Reductions by number (aten/src/ATen/core/Reduction.h)."""
_RAGGED = (
    "takes a mean over items whose number or weight differs between samples; return "
    "memfit.Total(sum, count), which micro-batches weight by their true counts"
)


def _total(use: Use, flow: Flow, num_dims: int, *, is_mean: bool) -> Flow:
    """Reduce what is known of each element to one number."""
    if flow.kind is Kind.FREE:
        return replace(flow, axes=(None,) * num_dims)
    return sum_over_batch(num_dims, flow.ratio * (use.sizes.shrink if is_mean else 1.0), flow)


def elementwise(use: Use) -> list[Flow]:
    """Compare element by element, then reduce as asked; weights may be broadcast."""
    flows = use.flows
    if any(flow.kind is Kind.SUM for flow in flows):
        raise CoupledError("compares a sum over the batch")
    if any(not flow.is_plain for flow in flows):
        raise CoupledError("compares values that depend on the batch size")
    reduction = use.argument("reduction")
    if reduction == _NONE:
        return [combined(use, use.tensors, 1.0)]
    size = use.size_of(use.tensors[0])
    if use.size_of(use.tensors[1]) != size:
        raise NotFollowedError("compares tensors of different shapes")
    if any(flow.is_positions for flow in flows):
        raise CoupledError("uses the positions of samples in the batch")
    each = samples_along(aligned(use, use.tensors, len(size)), *flows)
    return [_total(use, each, 0, is_mean=reduction == _MEAN)]


def elementwise_back(use: Use) -> list[Flow]:
    """Carry a gradient back through a comparison of elements."""
    gradient, *others = use.flows
    if any(not flow.is_plain or flow.kind is Kind.SUM for flow in others):
        raise CoupledError("compares values that depend on the batch size")
    if gradient.kind is Kind.SUM:
        raise CoupledError("multiplies a sum over the batch by each sample")
    shrink = use.sizes.shrink if use.argument("reduction") == _MEAN else 1.0
    found = combined(use, use.tensors, gradient.ratio * shrink)
    return [replace(found, is_uniform=False)] * len(use.call.results)


def _check_weights(use: Use, *, is_mean: bool) -> None:
    """Refuse weights of classes under a mean: they make the samples' weights differ.

    A label that equals ``ignore_index`` counts for nothing; see ``NeverHolds``.
    """
    weight = use.flow("weight") if use.argument("weight") is not None else None
    if weight is not None and weight.kind is not Kind.FREE:
        raise CoupledError("weights classes by values that depend on the batch")
    if not is_mean:
        return
    if weight is not None:
        raise CoupledError(_RAGGED)
    (target,) = use.known("target")
    ignored = use.argument("ignore_index")
    if target.sources is None or (ignored >= 0 and not target.sources):
        raise CoupledError(_RAGGED)
    use.rely_on(sorted(target.sources), ignored)


def likelihood(use: Use) -> list[Flow]:
    """Take the log-likelihood of labels; gives the total weight as well."""
    values, target = use.known("self", "target")
    if values.kind is not Kind.EACH or target.kind is not Kind.EACH:
        raise NotFollowedError("compares something that has no samples")
    if not values.is_plain or not _same_samples(values, target):
        raise CoupledError("brings samples together with other samples of the batch")
    reduction = use.argument("reduction")
    if values.batch_dim == 1 and len(values.axes) > 1:
        raise CoupledError("takes classes over the samples")
    _check_weights(use, is_mean=reduction == _MEAN)
    weight = Flow(kind=Kind.FREE, ratio=1.0 / use.sizes.shrink)
    if reduction == _NONE:
        axes = (values.axes[0], *values.axes[2:])
        each = Flow(kind=Kind.EACH, axes=axes, is_drawn=values.is_drawn)
        return [each, weight]
    return [_total(use, values, 0, is_mean=reduction == _MEAN), weight]


def _same_samples(values: Flow, target: Flow) -> bool:
    one, other = values.batch_dim, target.batch_dim
    if one is None or other is None:
        return False
    if (one if one == 0 else one - 1) != other:
        return False
    first, second = values.axes[one], target.axes[other]
    return first is not None and second is not None and first.matches(second)


def likelihood_back(use: Use) -> list[Flow]:
    """Carry a gradient back through the log-likelihood of labels."""
    gradient, values = use.flows[:2]
    if gradient.kind is Kind.SUM or not values.is_plain:
        raise CoupledError("multiplies a sum over the batch by each sample")
    shrink = use.sizes.shrink if use.argument("reduction") == _MEAN else 1.0
    found = samples_along(values.axes, values, gradient, ratio=gradient.ratio * shrink)
    return [replace(found, kind=Kind.EACH)]


def aligned_sequences(use: Use) -> list[Flow]:
    """Align labels with steps, for each sample (CTC): steps x samples x classes."""
    (values,) = use.known("log_probs")
    dim = 1 if len(values.axes) == 3 else 0
    if values.kind is not Kind.EACH or values.batch_dim != dim or not values.is_plain:
        raise CoupledError("aligns labels over the samples")
    targets = use.flow("targets")
    if targets is None or targets.batch_dim != 0 or len(targets.axes) != 2:
        raise NotFollowedError("is given labels that are not laid out sample by sample")
    axis = values.axes[dim]
    each = Flow(kind=Kind.EACH, axes=(axis,), is_drawn=values.is_drawn)
    kept = Flow(kind=Kind.EACH, axes=(axis, None, None), is_drawn=values.is_drawn)
    return [each, kept]


def aligned_sequences_back(use: Use) -> list[Flow]:
    """Carry gradients back through the alignment."""
    gradient, values = use.flows[:2]
    if gradient.kind is Kind.SUM:
        raise CoupledError("multiplies a sum over the batch by each sample")
    return [replace(values, ratio=gradient.ratio)]


def distances(use: Use) -> list[Flow]:
    """Refuse distances between all rows of one tensor."""
    ref = use.tensors[0]
    if use.flow_of(ref).kind is Kind.FREE:
        return [Flow(kind=Kind.FREE, axes=(None,))]
    raise CoupledError("compares samples of the batch with one another")


_ELEMENTWISE = (
    "mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)  # fmt: skip

RULES: Mapping[str, Any] = {
    **dict.fromkeys(_ELEMENTWISE, elementwise),
    **dict.fromkeys([f"{name}_backward" for name in _ELEMENTWISE], elementwise_back),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), likelihood),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), likelihood_back),
    "_ctc_loss": aligned_sequences,
    "_ctc_loss_backward": aligned_sequences_back,
    "_pdist_forward": distances,
}
