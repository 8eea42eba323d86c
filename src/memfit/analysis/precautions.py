"""What holds for every operator, whatever its rule says: checks before and after a rule.

A rule that forgets one of these would call a step separable that is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from memfit.analysis.dataflow import Ref, refs_in
from memfit.analysis.flow import Axis, Flow, Kind, sum_over_batch
from memfit.analysis.use import CoupledError, NotFollowedError, Use

_VIEWS = frozenset({
    "view", "_unsafe_view", "reshape", "_reshape_alias", "permute", "transpose", "t", "unsqueeze",
    "squeeze", "expand", "select", "slice", "narrow", "split", "split_with_sizes", "chunk",
    "unbind", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk",
    "detach", "alias", "lift", "lift_fresh", "requires_grad", "_lazy_clone", "clone",
    "_to_copy", "contiguous",
})  # fmt: skip
_SHAPE_ALONE = frozenset({
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
    "randint_like", "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided", "zero",
    "fill", "uniform", "normal", "bernoulli", "random", "exponential", "geometric", "cauchy",
    "log_normal",
})  # fmt: skip
"""Operators that look at no value of their first tensor."""
_KEEP_POSITIONS = _VIEWS | {"mul", "index", "_unsafe_index", "index_put", "_index_put_impl",
                            "_unsafe_index_put", "index_select", "index_add", "_embedding_bag",
                            "_embedding_bag_forward_only", "_embedding_bag_backward"}  # fmt: skip
_LINEAR = _VIEWS | {
    "sum", "mean", "add", "sub", "rsub", "subtract", "neg", "mul", "multiply", "div",
    "true_divide", "copy", "positive", "mm", "bmm", "mv", "dot", "vdot", "addmm", "baddbmm",
    "addmv", "ger", "outer", "cat", "stack", "gather", "index_select", "index", "_unsafe_index",
    "index_put", "_index_put_impl", "_unsafe_index_put", "as_strided", "constant_pad_nd", "repeat",
    "flip", "roll", "diagonal", "unfold", "view_as_real", "view_as_complex", "real", "imag",
    "_conj", "conj", "_conj_physical", "flatten", "broadcast_to", "embedding_dense_backward",
    "_sparse_coo_tensor_with_dims_and_tensors",
    "slice_backward", "select_backward", "where", "masked_fill", "diagonal_backward",
    "triu", "tril", "diag_embed", "linalg_lu_solve",
}  # fmt: skip
"""Operators whose rules know what to do with sums over the batch."""
_SCALING = _LINEAR | {
    "pow", "abs", "relu", "leaky_relu", "square", "sqrt", "rsqrt", "reciprocal", "sgn", "sign",
    "native_dropout", "convolution", "embedding", "scatter", "scatter_add",
    "scatter_reduce",
}  # fmt: skip
"""Operators whose rules know what to do with values that change with the batch size."""
_SIZE_ARGUMENTS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "expand", "broadcast_to", "new_zeros",
                     "new_ones", "new_empty", "zeros", "ones", "empty", "rand", "randn", "randint",
                     "normal", "lift", "flatten"), frozenset({"size", "shape"})),
    "_reshape_alias": frozenset({"size", "stride"}),
    **dict.fromkeys(("full", "new_full"), frozenset({"size", "fill_value"})),
    **dict.fromkeys(("full_like", "fill", "scalar_tensor"),
                    frozenset({"fill_value", "value", "s"})),
    **dict.fromkeys(("empty_strided", "new_empty_strided", "as_strided"),
                    frozenset({"size", "stride", "storage_offset"})),
    "empty_permuted": frozenset({"size"}),
    "repeat": frozenset({"repeats"}),
    **dict.fromkeys(("slice", "narrow"), frozenset({"start", "end", "length"})),
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"),
                    frozenset({"split_size", "split_sizes"})),
    "arange": frozenset({"end"}),
    "sum": frozenset({"dim"}),
    "affine_grid_generator": frozenset({"size"}),
    **dict.fromkeys(("mul", "multiply", "div", "true_divide", "add", "sub", "rsub", "subtract"),
                    frozenset({"other"})),
    **dict.fromkeys(("native_group_norm", "native_group_norm_backward"), frozenset({"N"})),
    "convolution": frozenset({"groups"}),
    "convolution_backward": frozenset({"groups", "bias_sizes"}),
    "slice_backward": frozenset({"input_sizes", "start", "end"}),
    **dict.fromkeys(("select_backward", "unfold_backward", "diagonal_backward"),
                    frozenset({"input_sizes"})),
    "value_selecting_reduction_backward": frozenset({"sizes"}),
    "_ctc_loss": frozenset({"input_lengths", "target_lengths"}),
    "_ctc_loss_backward": frozenset({"input_lengths", "target_lengths"}),
}  # fmt: skip
"""Numbers that may follow the batch size: the operator's rule, or the shapes of its results,
answer for them. Any other that does is refused."""
_GIVEN_BACK = "input_size"
"""The shape of a result of backward, by which it is checked."""
_DRAWS_BY_RULE = _SHAPE_ALONE | {
    "rand", "randn", "randint", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet",
    "native_dropout", "randperm", "multinomial",
}  # fmt: skip
_DRAWS_ANEW = (
    "draws random numbers from a state that the step itself sets (a seed, fork_rng, a generator of "
    "its own), so that each piece would draw the same ones"
)
_TIMES_SUM = "multiplies a sum over the batch by something that depends on it"
_TOTAL_WEIGHT = "total_weight"


def plain_name(use: Use) -> str:
    """Return the operator's name; in-place ones share it with the others."""
    return use.name if use.name.startswith("_") else use.name.removesuffix("_")


def check_before(use: Use) -> None:
    """Refuse what no rule is made for.

    Raises:
        CoupledError: if samples meet, or a number depends on the batch size.
        NotFollowedError: if the operator works in a way that is not followed.
    """
    name = plain_name(use)
    if _has_out(use.call.func):
        raise NotFollowedError("writes into a tensor that it is given as out")
    differing = differing_numbers(use)
    if any(each != _GIVEN_BACK for each in differing - _SIZE_ARGUMENTS.get(name, frozenset())):
        raise CoupledError("is given a number that depends on the batch size")
    flows = use.flows
    if name in _SHAPE_ALONE:
        return
    if any(flow.is_positions for flow in flows) and name not in _KEEP_POSITIONS:
        raise CoupledError("uses the positions of samples in the batch")
    if is_backward(use):
        return
    if name not in _LINEAR and any(flow.kind is Kind.SUM for flow in flows):
        raise CoupledError("applies a function to a sum over the batch")
    if name not in _SCALING and not _is_scaling(name) and not all(f.is_plain for f in flows):
        raise CoupledError("applies a function to values that depend on the batch size")


def _is_scaling(name: str) -> bool:
    return name.startswith(("avg_pool", "upsample", "_upsample", "_adaptive_avg_pool"))


@cache
def _has_out(func: Any) -> bool:
    return any(getattr(argument, "is_out", False) for argument in func._schema.arguments)


def differing_numbers(use: Use) -> set[str]:
    """Name the arguments other than tensors that are not the same at both sizes."""
    found = set()
    arguments = use.call.func._schema.arguments
    for one, other, argument in zip(
        use.call.arguments, use.other.arguments, arguments, strict=True
    ):
        if one is not other and not _is_same(one, other):
            found.add(argument.name)
    return found


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Ref) or isinstance(other, Ref):
        return isinstance(one, Ref) and isinstance(other, Ref)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, (int, float, complex)) or isinstance(other, (int, float, complex)):
        return bool(one == other)
    return True  # devices, types, layouts: the recordings' alignment has compared them


def check_random(use: Use, *, is_drawing: bool) -> None:
    """Refuse random numbers that pieces would share, or of which no rule speaks.

    Raises:
        CoupledError: if each piece would draw the same.
        NotFollowedError: if no rule speaks of them.
    """
    if use.call.draws_anew:
        raise CoupledError(_DRAWS_ANEW)
    name = plain_name(use)
    if is_drawing and name not in _DRAWS_BY_RULE and "attention" not in name:
        raise NotFollowedError("draws random numbers")


def is_backward(use: Use) -> bool:
    """Return whether an operator carries a gradient back, linear in it, by its name."""
    name = use.name
    is_named = name.endswith(("_backward", "_backward_data")) or "_backward_" in name
    return is_named and name not in _LINEAR and next(gradients_of(use), None) is not None


def gradients_of(use: Use) -> Iterator[Ref]:
    """Yield the gradients that a backward operator is given."""
    arguments = use.call.func._schema.arguments
    for value, argument in zip(use.call.arguments, arguments, strict=True):
        if argument.name.startswith("grad") and isinstance(value, Ref):
            yield value


def carried_back(use: Use) -> list[Flow] | None:
    """Check what a backward operator is given; say what comes of a gradient that is a sum.

    Raises:
        CoupledError: if a gradient meets other samples, or values that depend on the batch size.
    """
    gradients = list(gradients_of(use))
    weight = use.argument(_TOTAL_WEIGHT)
    others = [ref for ref in use.tensors if ref not in gradients and ref != weight]
    if any(use.flow_of(ref).kind is Kind.SUM or not use.flow_of(ref).is_plain for ref in others):
        raise CoupledError("applies a function to values that depend on the batch size")
    flows = [use.flow_of(ref) for ref in gradients]
    if any(flow.kind is Kind.SUM for flow in flows):
        return _of_sums(use, flows, [use.flow_of(ref) for ref in others])
    for gradient in gradients:
        for ref in use.tensors:
            _check_in_step(use, gradient, ref)
    return None


def _of_sums(use: Use, gradients: Sequence[Flow], others: Sequence[Flow]) -> list[Flow]:
    known = next(flow for flow in gradients if flow.kind is Kind.SUM)
    is_alone = len(gradients) == 1 and all(flow.kind is Kind.FREE for flow in others)
    if not is_alone or use.call.func._schema.is_mutable:
        raise CoupledError(_TIMES_SUM)
    return [sum_over_batch(len(use.size_of(ref)), known.ratio, known) for ref in use.call.results]


def _check_in_step(use: Use, gradient: Ref, ref: Ref) -> None:
    """Check that a gradient and a tensor of its shape count samples alike.

    Raises:
        CoupledError: if they do not.
    """
    one, other = use.flow_of(gradient), use.flow_of(ref)
    if use.size_of(gradient) != use.size_of(ref) or other.is_opaque:
        return
    for axis, its in zip(one.axes, other.axes, strict=True):
        if axis is not None and its is not None and not axis.matches(its):
            raise CoupledError("brings samples together with other samples of the batch")
        if (axis is None) != (its is None) and Kind.EACH is one.kind is other.kind:
            raise CoupledError("compares samples of the batch with one another")


def check_after(use: Use, flows: Sequence[Flow]) -> list[Flow]:
    """Check what a rule says against the shapes and types of the results at both sizes.

    Raises:
        CoupledError: if more than one dimension would count samples.
        NotFollowedError: if it cannot be so.
    """
    results = use.call.results
    if len(flows) != len(results):
        raise NotFollowedError("gives another number of results than expected")
    for ref, flow in zip(results, flows, strict=True):
        if not flow.is_bad and not flow.is_opaque:
            _check_shape(use, ref, flow)
            _check_type(use, ref, flow)
    exact = _exact_axes(use)
    flows = [_with_exact_axis(flow, exact) for flow in flows]
    return [_as_type_allows(use, *each) for each in zip(results, flows, strict=True)]


def _exact_axes(use: Use) -> set[Axis]:
    """Collect how the samples lie in the tensors that an operator computes with."""
    if plain_name(use) in _SHAPE_ALONE:
        return set()
    axes = (axis for flow in use.flows if not flow.is_opaque for axis in flow.axes)
    return {axis for axis in axes if axis is not None and not axis.wild}


def _with_exact_axis(flow: Flow, exact: set[Axis]) -> Flow:
    """Let a result not be alike for all samples where what it is computed from is not.

    Raises:
        NotFollowedError: if it is not clear how its samples lie.
    """
    if not exact or flow.is_bad or flow.is_uniform or not any(a and a.wild for a in flow.axes):
        return flow
    matching = [axis for axis in exact if any(a is not None and a.matches(axis) for a in flow.axes)]
    if len(matching) != 1:
        raise NotFollowedError("lays samples out in a way that is not known")
    return replace(
        flow, axes=tuple(matching[0] if axis is not None else None for axis in flow.axes)
    )


def _check_shape(use: Use, ref: Ref, flow: Flow) -> None:
    size, other = use.size_of(ref), use.other_size_of(ref)
    if not len(flow.axes) == len(size) == len(other):
        raise NotFollowedError("gives another number of dimensions than expected")
    num_axes = sum(axis is not None for axis in flow.axes)
    if num_axes > 1:
        raise CoupledError("compares samples of the batch with one another")
    if (flow.kind is Kind.EACH) != (num_axes == 1):
        raise NotFollowedError("could not be followed")
    sizes = use.sizes
    for axis, one, two in zip(flow.axes, size, other, strict=True):
        wanted = (one, one) if axis is None else (
            axis.extent(sizes.first), axis.extent(sizes.second)
        )  # fmt: skip
        if (one, two) != wanted:
            raise NotFollowedError("gives a shape that was not expected")


def _check_type(use: Use, ref: Ref, flow: Flow) -> None:
    """Refuse sums, and values that change with the size, that are rounded to whole numbers."""
    if flow.kind is not Kind.SUM and flow.is_plain:
        return
    if _is_real(use, ref) or flow.value == 0.0:
        return
    if flow.kind is Kind.FREE and flow.is_uniform and not use.tensors:
        return
    is_truth = str(use.shape_of(ref).dtype) == "torch.bool"
    if is_truth or any(_is_real(use, each) for each in refs_in(use.call.arguments)):
        raise CoupledError("rounds a value that depends on the whole batch")


def _is_real(use: Use, ref: Ref) -> bool:
    dtype = use.shape_of(ref).dtype
    return dtype.is_floating_point or dtype.is_complex


def _as_type_allows(use: Use, ref: Ref, flow: Flow) -> Flow:
    """Forget where elements come from if they may have changed on the way."""
    if flow.sources is None or not use.tensors or not flow.sources:
        return flow
    first, result = use.shape_of(use.tensors[0]).dtype, use.shape_of(ref).dtype
    is_kept = first == result or (
        not first.is_floating_point and not result.is_floating_point
        and first.itemsize <= result.itemsize
    ) or str(result) == "torch.bool"  # fmt: skip
    return flow if is_kept else replace(flow, sources=None)
