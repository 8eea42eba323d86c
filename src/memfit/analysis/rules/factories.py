"""Operators that make tensors out of numbers, or of random draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isnan
from typing import Any

from memfit.analysis.flow import Axis, Flow, Kind, is_one, samples_along
from memfit.analysis.rules.pointwise import any_pointwise
from memfit.analysis.use import CoupledError, Use

_SAFE_BYTES = 4
"""A type of as many bytes counts as far as batches go."""


def _made(use: Use, **known: Any) -> Flow:
    return samples_along(use.varying_axes(use.call.results[0]), **known)


def filled(use: Use) -> list[Flow]:
    """Make a tensor of one value everywhere."""
    value = {"zeros": 0.0, "ones": 1.0}.get(use.name.removeprefix("new_").removesuffix("_like"))
    ratio = 1.0
    for name in ("fill_value", "value", "s"):
        if not use.has(name):
            continue
        first, second = use.arguments(name)
        if isinstance(first, (int, float)):
            value = float(first)
            ratio = 1.0 if first == second or isnan(first) else _ratio(first, second)
        else:
            return [replace(_made(use, is_uniform=True), ratio=_free_ratio(use, name))]
    if use.name in {"zero_", "zero"}:
        value = 0.0
    return [_made(use, is_uniform=True, ratio=ratio, value=value)]


def _free_ratio(use: Use, name: str) -> float:
    flow = use.flow(name)
    if flow is None or flow.kind is not Kind.FREE:
        raise CoupledError("fills a tensor with a value that depends on the batch")
    return flow.ratio


def _ratio(first: float, second: float) -> float:
    if not first or not second:
        raise CoupledError("is given a number that depends on the batch size")
    return second / first


def uninitialised(use: Use) -> list[Flow]:
    """Make a tensor that is written later."""
    return [_made(use)]


def counted(use: Use) -> list[Flow]:
    """Make a range of numbers; one as long as the batch numbers the samples."""
    size, other = use.result_size()[0], use.other_size_of(use.call.results[0])[0]
    if size == other:
        same = all(first == second for first, second in _bounds(use))
        if not same:
            raise CoupledError("makes numbers that depend on the batch size")
        return [Flow(kind=Kind.FREE, axes=(None,), sources=frozenset())]
    start = use.argument("start") or 0
    step = use.argument("step")
    if use.name != "arange" or use.shape_of(use.call.results[0]).dtype.itemsize < _SAFE_BYTES:
        raise CoupledError("numbers the samples of the batch")
    numbers_samples = (size, other) == (use.sizes.first, use.sizes.second)
    if numbers_samples and start == 0 and (step is None or (type(step) is int and step > 0)):
        return [Flow(kind=Kind.EACH, axes=(Axis(),), is_positions=True, stride=step or 1,
                     sources=frozenset())]  # fmt: skip
    raise CoupledError("numbers the samples of the batch")


def _bounds(use: Use) -> list[tuple[Any, Any]]:
    return [use.arguments(name) for name in ("start", "end", "step", "steps") if use.has(name)]


def positioned(use: Use) -> list[Flow]:
    """Make a matrix whose entries depend on their places."""
    axes = use.varying_axes(use.call.results[0])
    if any(axes):
        raise CoupledError("makes a matrix over the samples of the batch")
    return [Flow(kind=Kind.FREE, axes=axes, sources=frozenset())]


def drawn(use: Use) -> list[Flow]:
    """Draw random numbers, for each sample its own."""
    for flow in use.flows:
        if flow.kind is Kind.SUM or not is_one(flow.ratio):
            raise CoupledError("draws random numbers by values that depend on the batch")
    axes = use.varying_axes(use.call.results[0])
    known = [flow for flow in use.flows if any(flow.axes)]
    if known:
        found = any_pointwise(use)[0]
        return [replace(found, is_drawn=True, is_uniform=False)]
    if not any(axes):
        raise CoupledError("draws random numbers once for the whole batch")
    return [Flow(kind=Kind.EACH, axes=axes, is_drawn=True)]


def drawn_in_place(use: Use) -> list[Flow]:
    """Fill a tensor with random numbers, for each sample its own."""
    ref = use.tensors[0]
    flow = use.flow_of(ref)
    if any(flow.axes):
        return [Flow(kind=Kind.EACH, axes=flow.axes, is_drawn=True)]
    return drawn(use)


def dropped_out(use: Use) -> list[Flow]:
    """Drop elements at random; return the mask as well."""
    flow = use.flows[0]
    if flow.kind is not Kind.EACH:
        if use.argument("p") == 0 or use.argument("train") is False:
            return [flow, replace(flow, ratio=1.0)]
        raise CoupledError("draws random numbers once for the whole batch")
    out = replace(flow, is_drawn=True, is_uniform=False, value=None)
    return [out, Flow(kind=Kind.EACH, axes=flow.axes, is_drawn=True)]


def permuted_at_random(use: Use) -> list[Flow]:
    """Draw an order."""
    if any(use.varying_axes(use.call.results[0])):
        raise CoupledError("draws an order of the samples of the batch")
    raise CoupledError("draws random numbers once for the whole batch")


def chosen_at_random(use: Use) -> list[Flow]:
    """Draw categories by the probabilities in each row."""
    flow = use.flows[0]
    dim = flow.batch_dim
    if flow.kind is not Kind.EACH or dim != 0 or len(flow.axes) != 2:
        raise CoupledError("draws among the samples of the batch, or once for all of them")
    known = Flow(kind=Kind.EACH, axes=flow.axes, is_drawn=True, sources=frozenset())
    return [known]


RULES: Mapping[str, Any] = {
    **dict.fromkeys(
        ("zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones",
         "new_full", "fill", "fill_", "zero", "zero_", "scalar_tensor"),
        filled,
    ),
    **dict.fromkeys(
        ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided",
         "empty_permuted"),
        uninitialised,
    ),
    **dict.fromkeys(("arange", "linspace", "logspace", "range"), counted),
    **dict.fromkeys(("eye", "tril_indices", "triu_indices"), positioned),
    **dict.fromkeys(
        ("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal",
         "bernoulli", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet"),
        drawn,
    ),
    **dict.fromkeys(
        ("uniform_", "normal_", "bernoulli_", "random_", "exponential_", "geometric_", "cauchy_",
         "log_normal_"),
        drawn_in_place,
    ),
    "native_dropout": dropped_out,
    "randperm": permuted_at_random,
    "multinomial": chosen_at_random,
}  # fmt: skip
