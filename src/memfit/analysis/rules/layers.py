"""Layers in one operator: convolutions, normalisations, pooling, attention, recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from memfit.analysis.dataflow import Ref
from memfit.analysis.flow import Axis, Flow, Kind, samples_along, sum_over_batch
from memfit.analysis.use import CoupledError, NotFollowedError, Use

NOT_PLAIN = "applies a layer to values that depend on the batch size"


def _input(use: Use, name: str = "input") -> Flow:
    """Return what is known of a layer's input, which must hold samples and nothing else.

    Raises:
        CoupledError: if it is a sum over the batch, or scaled by the batch size.
    """
    flow = use.flow(name) or use.flows[0]
    if flow.kind is Kind.SUM:
        raise CoupledError("applies a layer to a sum over the batch")
    return flow


def check_weights(use: Use, *names: str) -> None:
    """Refuse weights that depend on the batch."""
    for name in names:
        flow = use.flow(name) if use.has(name) else None
        if flow is not None and (flow.kind is not Kind.FREE or not flow.is_plain):
            raise NotFollowedError("has weights that depend on the batch")


def _total(num_dims: int, gradient: Flow, *others: Flow) -> Flow:
    """Return the gradient of weights: a sum over the samples."""
    found = sum_over_batch(num_dims, gradient.ratio, gradient, *others)
    is_sum = any(flow.kind is Kind.EACH for flow in (gradient, *others))
    return found if is_sum else replace(found, kind=Kind.FREE)


def _results_of(use: Use, flows: Sequence[Flow]) -> list[Flow]:
    """Return each result what is known of it; those that were not asked for are missing."""
    found = list(flows)
    if len(found) == len(use.call.results):
        return found
    mask = use.argument("output_mask") or use.argument("grad_input_mask")
    if mask is None or len(mask) != len(found):
        raise NotFollowedError("gives another number of results than expected")
    return [flow for flow, is_wanted in zip(found, mask, strict=True) if is_wanted]


def convolved(use: Use) -> list[Flow]:
    """Convolve each sample."""
    flow = _input(use)
    if _has_own_groups(use):
        return [_in_own_groups(use, "input", "weight", "bias")]
    check_weights(use, "weight", "bias")
    if not flow.is_plain and use.argument("bias") is not None:
        raise CoupledError(NOT_PLAIN)
    if flow.kind is Kind.EACH and flow.batch_dim != 0:
        raise NotFollowedError("convolves over the dimension of the samples")
    return [_like(flow)]


def _has_own_groups(use: Use) -> bool:
    """Return whether a convolution's groups follow the batch, so that each sample has its own."""
    first, second = use.arguments("groups")
    return bool(first != second)


def _in_own_groups(use: Use, *names: str) -> Flow:
    """Check that samples lie behind one another in the channels, each with weights of its own.

    Raises:
        CoupledError: if a group holds channels of several samples, or meets weights of another one.
    """
    sizes, groups = use.sizes, use.arguments("groups")
    if groups[0] % sizes.first or groups[0] * sizes.second != groups[1] * sizes.first:
        raise CoupledError("has groups of channels of several samples")
    flows = [(flow, name == names[0]) for name in names if (flow := use.flow(name)) is not None]
    for flow, is_input in flows:
        axis = flow.axes[1 if is_input else 0]
        if axis is None or not axis.matches(Axis(inner=axis.outer * axis.inner)):
            raise CoupledError("brings samples together with other samples of the batch")
    if any(flow.kind is not Kind.EACH or not flow.is_plain for flow, _ in flows[1:]):
        raise CoupledError(NOT_PLAIN)
    if not flows[0][0].is_plain and use.flow("bias") is not None:
        raise CoupledError(NOT_PLAIN)
    axes = use.varying_axes(use.call.results[0])
    own = (None if axis is None else Axis(inner=axis.inner) for axis in axes)
    return samples_along(own, *(flow for flow, _ in flows), ratio=flows[0][0].ratio)


def _like(flow: Flow, num_dims: int | None = None) -> Flow:
    """Return a result whose samples lie where the input's do."""
    axes = flow.axes if num_dims is None else (*flow.axes[:1], *(None,) * (num_dims - 1))
    return replace(
        flow, axes=axes, is_uniform=False, value=None, sources=None, is_positions=False,
        has_holes=False,
    )  # fmt: skip


def convolved_back(use: Use) -> list[Flow]:
    """Carry a gradient back through a convolution."""
    gradient, inputs = use.flows[:2]
    if _has_own_groups(use):
        _in_own_groups(use, "grad_output", "weight")
        _in_own_groups(use, "input", "weight")
        varying = [use.varying_axes(result) for result in use.call.results]
        own = [[axis and Axis(inner=axis.inner) for axis in axes] for axes in varying]
        return [samples_along(axes, *use.flows, ratio=gradient.ratio) for axes in own]
    check_weights(use, "weight")
    for flow in (gradient, inputs):
        if flow.kind is Kind.EACH and flow.batch_dim != 0:
            raise NotFollowedError("convolves over the dimension of the samples")
    if gradient.kind is Kind.SUM or not inputs.is_plain or inputs.kind is Kind.SUM:
        raise CoupledError(NOT_PLAIN)
    check_same_samples(gradient, inputs)
    weight = _total(len(use.size("weight")), gradient, inputs)
    return _results_of(use, [_like(gradient), weight, _total(1, gradient)])


def check_same_samples(*flows: Flow) -> None:
    """Check that samples lie alike in the first dimension of all tensors.

    Raises:
        CoupledError: if they do not.
    """
    axes = [flow.axes[0] for flow in flows if flow.axes and flow.axes[0] is not None]
    if any(not axis.matches(axes[0]) for axis in axes):
        raise CoupledError("brings samples together with other samples of the batch")


def layer_normalised(use: Use) -> list[Flow]:
    """Normalise over the last dimensions."""
    flow = _input(use)
    check_weights(use, "weight", "bias")
    num_normalised = len(use.argument("normalized_shape"))
    if any(flow.axes[len(flow.axes) - num_normalised :]):
        raise CoupledError("normalises over the samples")
    if not flow.is_plain:
        raise CoupledError(NOT_PLAIN)
    return [_like(flow)] * len(use.call.results)


def layer_normalised_back(use: Use) -> list[Flow]:
    """Carry a gradient back through layer normalisation."""
    gradient, inputs = use.flows[:2]
    num_normalised = len(use.argument("normalized_shape"))
    if gradient.kind is Kind.SUM or not inputs.is_plain:
        raise CoupledError(NOT_PLAIN)
    if any(inputs.axes[len(inputs.axes) - num_normalised :]):
        raise CoupledError("normalises over the samples")
    of_weight = _total(num_normalised, gradient, inputs)
    flows = [_like(gradient), of_weight, _total(num_normalised, gradient)]
    if "rms" in use.name:
        flows = flows[:2]
    return _results_of(use, flows)


def group_normalised(use: Use) -> list[Flow]:
    """Normalise groups of channels of each sample; gives mean and scale per group as well."""
    flow = _input(use)
    check_weights(use, "weight", "bias")
    if not flow.is_plain or (flow.kind is Kind.EACH and flow.batch_dim != 0):
        raise CoupledError(NOT_PLAIN)
    return [_like(flow), _like(flow, 2), _like(flow, 2)]


def group_normalised_back(use: Use) -> list[Flow]:
    """Carry a gradient back through group normalisation."""
    gradient, inputs = use.flows[:2]
    if gradient.kind is Kind.SUM or not inputs.is_plain:
        raise CoupledError(NOT_PLAIN)
    if any(f.kind is Kind.EACH and f.batch_dim != 0 for f in (gradient, inputs)):
        raise CoupledError("normalises over the samples")
    total = _total(1, gradient, inputs)
    return _results_of(use, [_like(gradient), total, total])


def _is_training(use: Use) -> bool:
    for name in ("training", "train"):
        if use.has(name):
            return bool(use.argument(name))
    return "no_training" not in use.name


def batch_normalised(use: Use) -> list[Flow]:
    """Normalise by statistics over all dimensions but the second, or by given ones."""
    flow = _input(use)
    if not flow.is_plain:
        raise CoupledError(NOT_PLAIN)
    if flow.kind is not Kind.EACH:
        raise NotFollowedError("normalises something that has no samples")
    if flow.batch_dim == 1:  # statistics of each sample's own channels
        _check_own_weights(use, flow)
        stats = Flow(kind=Kind.EACH, axes=(flow.axes[1],))
        return [_like(flow), stats, stats, *[stats] * (len(use.call.results) - 3)]
    if _is_training(use) and not use.gets_statistics:
        raise CoupledError("takes its statistics over the whole batch (batch normalisation)")
    check_weights(use, "weight", "bias", "running_mean", "running_var")
    given = Flow(kind=Kind.FREE, axes=(None,))
    return [_like(flow), given, given, *[given] * (len(use.call.results) - 3)]


def check_statistics_of(use: Use) -> None:
    """Check that statistics which are taken as given are not of what every piece computes anew.

    They are merged from those of the pieces, and such rows would count once for each.

    Raises:
        CoupledError: if they are.
    """
    if use.gets_statistics and use.name in _BATCH_NORMS and _is_training(use):
        raise CoupledError(
            "normalises something without samples (batch normalisation), which every piece would "
            "count again"
        )


def _check_own_weights(use: Use, flow: Flow) -> None:
    """Check that weights and statistics were repeated for each sample, as the channels are."""
    for name in ("weight", "bias", "running_mean", "running_var"):
        given = use.flow(name) if use.has(name) else None
        axis = flow.axes[1]
        if given is None:
            continue
        its = given.axes[0] if given.kind is Kind.EACH else None
        if axis is None or its is None or not axis.matches(its):
            raise NotFollowedError("has weights that are not repeated for each sample")


def batch_normalised_back(use: Use) -> list[Flow]:
    """Carry a gradient back through batch normalisation with given statistics."""
    names = ("grad_out", "grad_output", "input")
    found = [use.flow(name) for name in names if use.has(name)]
    gradient, inputs = [flow for flow in found if flow is not None]
    if gradient.kind is Kind.SUM or not inputs.is_plain:
        raise CoupledError(NOT_PLAIN)
    if inputs.batch_dim == 1:
        each = Flow(kind=Kind.EACH, axes=(inputs.axes[1],), ratio=gradient.ratio)
        return _results_of(use, [_like(gradient), each, each])
    # What the forward has saved is mixed if it took its own statistics, and never comes here then.
    if _is_training(use) and use.flow("save_mean") is None:
        raise CoupledError("takes its statistics over the whole batch (batch normalisation)")
    total = _total(1, gradient, inputs)
    return _results_of(use, [_like(gradient), total, total])


_LINEAR_IN = {"triu": "self", "tril": "self", "linalg_lu_solve": "B"}


def leading(num_dims: int) -> Callable[[Use], list[Flow]]:
    """Return the rule of operators that work on the last dimensions alone."""

    def rule(use: Use) -> list[Flow]:
        flows = [use.flow_of(ref) for ref in use.tensors]
        linear = use.flow(_LINEAR_IN[use.name]) if use.name in _LINEAR_IN else None
        others = (flow for flow in flows if flow is not linear)
        plain = all(flow.kind is Kind.FREE and flow.is_plain for flow in others)
        if linear is not None and linear.kind is Kind.SUM and plain:
            return [replace(linear, axes=(None,) * len(use.result_size()))]
        axes = _common_leading(use, num_dims)
        for flow in flows:
            if flow.kind is Kind.SUM or (not flow.is_plain and len(flows) > 1):
                raise CoupledError(NOT_PLAIN)
        if not flows[0].is_plain:
            raise CoupledError(NOT_PLAIN)
        return [_with_leading(use, result, axes, flows) for result in use.call.results]

    return rule


def _common_leading(use: Use, num_dims: int) -> list[Axis | None]:
    found: list[Axis | None] = []
    for ref in use.tensors:
        axes = use.flow_of(ref).axes
        own_dims = num_dims - (ref == use.argument("pivots"))  # one number for each row of a matrix
        if any(axes[max(0, len(axes) - own_dims) :]):
            raise CoupledError("works along the samples")
        mine = list(axes[: max(0, len(axes) - own_dims)])
        if any(mine):
            if any(found) and mine != found:
                raise CoupledError("brings samples together with other samples of the batch")
            found = mine
    return found


def _with_leading(
    use: Use, result: Ref, axes: Sequence[Axis | None], flows: Sequence[Flow]
) -> Flow:
    size = use.size_of(result)
    return samples_along((*axes, *(None,) * (len(size) - len(axes)))[: len(size)], *flows)


def searched(use: Use) -> list[Flow]:
    """Look for places in sorted numbers, which no sample may have to itself."""
    name = "boundaries" if use.has("boundaries") else "sorted_sequence"
    check_weights(use, name, "sorter")
    flow = use.flow("self")
    if flow is None or len(use.size(name)) != 1:
        raise NotFollowedError("looks for places in several rows")
    return [Flow(kind=flow.kind, axes=flow.axes, is_drawn=flow.is_drawn, sources=frozenset())]


def spatial(use: Use) -> list[Flow]:
    """Work on space, channel by channel: pooling, resizing, padding."""
    flow = _input(use, "self")
    dim = flow.batch_dim
    if flow.kind is Kind.EACH and (dim is None or dim >= len(flow.axes) - _spatial_dims(use)):
        raise CoupledError("works along the samples")
    is_linear = not any(word in use.name for word in ("max_pool",))
    if not flow.is_plain and not is_linear:
        raise CoupledError(NOT_PLAIN)
    return [_like(flow)] * len(use.call.results)


def _spatial_dims(use: Use) -> int:
    """Read the number of dimensions of space from the operator's name (``avg_pool2d``)."""
    return next(int(place) for place, letter in zip(use.name, use.name[1:], strict=False)
                if place in "123" and letter == "d")  # fmt: skip


def spatial_back(use: Use) -> list[Flow]:
    """Carry a gradient back through work on space."""
    gradient, *others = use.flows
    if gradient.kind is Kind.SUM or any(not flow.is_plain for flow in others):
        raise CoupledError(NOT_PLAIN)
    dim = gradient.batch_dim
    if dim is not None and dim >= len(gradient.axes) - _spatial_dims(use):
        raise CoupledError("works along the samples")
    check_same_samples(gradient, *others)
    return [_like(gradient)] * len(use.call.results)


_SPATIAL = ("pool", "upsample", "reflection_pad", "replication_pad", "_pdist")


def _spatial_names() -> tuple[list[str], list[str]]:
    forward, backward = [], []
    for dims in ("1d", "2d", "3d"):
        for name in (f"avg_pool{dims}", f"_adaptive_avg_pool{dims}", f"adaptive_avg_pool{dims}",
                     f"max_pool{dims}_with_indices", f"adaptive_max_pool{dims}", f"max_pool{dims}",
                     f"reflection_pad{dims}", f"replication_pad{dims}"):  # fmt: skip
            forward.append(name)
            backward.append(f"{name}_backward")
    for mode in (
        "nearest1d", "nearest2d", "nearest3d", "_nearest_exact1d", "_nearest_exact2d",
        "_nearest_exact3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d",
    ):  # fmt: skip
        prefix = "_upsample" if mode.startswith("_") else "upsample_"
        name = f"{prefix}{mode}"
        forward += [name, f"{name}_aa", f"_{name}_aa"]
        backward += [f"{name}_backward", f"_{name}_aa_backward"]
    return forward, backward


_FORWARD, _BACKWARD = _spatial_names()
_BATCH_NORMS = (
    "native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit", "batch_norm",
    "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training",
    "_batch_norm_with_update", "_batch_norm_no_update", "_batch_norm_with_update_functional",
)  # fmt: skip

RULES: Mapping[str, Any] = {
    **dict.fromkeys(("convolution", "_convolution", "convolution_overrideable"), convolved),
    **dict.fromkeys(("convolution_backward", "convolution_backward_overrideable"), convolved_back),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), layer_normalised),
    **dict.fromkeys(
        ("native_layer_norm_backward", "_fused_rms_norm_backward"), layer_normalised_back
    ),
    "native_group_norm": group_normalised,
    "native_group_norm_backward": group_normalised_back,
    **dict.fromkeys(_BATCH_NORMS, batch_normalised),
    **dict.fromkeys(
        ("native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward"),
        batch_normalised_back,
    ),
    **dict.fromkeys(_FORWARD, spatial),
    **dict.fromkeys(_BACKWARD, spatial_back),
    **dict.fromkeys(
        ("linalg_cholesky_ex", "linalg_inv_ex", "_linalg_svd", "_linalg_eigh", "linalg_qr",
         "_linalg_det", "_linalg_slogdet", "triu", "tril", "linalg_lu_factor_ex", "cholesky",
         "_linalg_solve_ex", "linalg_solve_triangular", "cholesky_solve", "cholesky_inverse",
         "linalg_matrix_exp", "matrix_exp", "linalg_lu_solve", "linalg_lu",
         "affine_grid_generator"),
        leading(2),
    ),
    **dict.fromkeys(("grid_sampler_2d", "grid_sampler_3d"), leading(3)),
    **dict.fromkeys(("bucketize", "searchsorted"), searched),
}  # fmt: skip
