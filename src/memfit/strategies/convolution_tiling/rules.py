"""Which rule a call goes by, and what the rules of a whole graph are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NoReturn

from memfit.strategies.convolution_tiling.capture import Call, Graph, NotCapturedError, Value
from memfit.strategies.convolution_tiling.elementwise import cat, permuted, pointwise, row_by_row
from memfit.strategies.convolution_tiling.norms import Norm, norm, norm_of
from memfit.strategies.convolution_tiling.pools import average_pool, max_pool
from memfit.strategies.convolution_tiling.resizing import interpolate
from memfit.strategies.convolution_tiling.slabs import Local
from memfit.strategies.convolution_tiling.windows import (
    Convolution,
    convolution,
    convolution_of,
    transposed,
)

_Rule = Callable[[Call, Sequence[Value], Mapping[int, int]], Local | None]
_RULES: tuple[tuple[_Rule, str], ...] = (
    (convolution, "conv1d conv2d conv3d"),
    (transposed, "conv_transpose1d conv_transpose2d conv_transpose3d"),
    (max_pool, "max_pool1d max_pool2d max_pool3d"),
    (average_pool, "avg_pool1d avg_pool2d avg_pool3d"),
    (cat, "cat concat concatenate"),
    (permuted, "transpose permute"),
    (interpolate, "interpolate"),
    (norm, "group_norm instance_norm"),
    (row_by_row, "batch_norm layer_norm linear softmax log_softmax"),
    (pointwise, "gelu relu silu sigmoid tanh leaky_relu elu softplus hardswish hardsigmoid relu6"),
    (pointwise, "mish selu celu logsigmoid softsign hardtanh threshold prelu dropout dropout2d"),
    (pointwise, "dropout3d add sub mul div truediv neg exp log abs pow square sqrt rsqrt clamp"),
    (pointwise, "clamp_min clamp_max rsub radd rmul where maximum minimum sin cos erf tanhshrink"),
    (pointwise, "float double half bfloat16 to type contiguous clone detach"),
)
_MOST_OTHER = 0.25
"""What may be made outside of rows, as a part of what the convolutions make."""
_FEWEST_CONVOLUTIONS = 2
_FEWEST_DIMENSIONS = 3


def local_rule(call: Call, values: Sequence[Value], dims: Mapping[int, int]) -> Local | None:
    """Return how a call goes row by row; None if it must see everything.

    Args:
        call: one call.
        values: all values.
        dims: the dimension that holds rows, of every value that has been followed so far.
    """
    if len(call.outs) != 1 or not any(index in dims for index in call.inputs):
        return None
    for rule, names in _RULES:
        if call.name in names.split():
            found = rule(call, values, dims)
            # A value with rows in another place, such as weights that are computed, is read whole.
            followed = {index for index in call.inputs if index in dims}
            return found if found and followed <= found.needs((0, 1)).keys() else None
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How every call of a graph goes."""

    graph: Graph
    locals: Mapping[int, Local]
    """By the index of the value that the call gives."""
    call_of: Mapping[int, Call]
    dims: Mapping[int, int]
    norms: Mapping[int, Norm]
    convolutions: Mapping[int, Convolution]

    def flops(self, index: int) -> int:
        """Count the multiplications and additions of a convolution; 0 for other calls."""
        call = self.call_of[index]
        if not call.name.startswith("conv"):
            return 0
        weight = self.graph.values[call.inputs[1]].shape
        tensor = call.inputs[0] if "transpose" in call.name else index
        shape = self.graph.values[tensor].shape
        return 2 * shape[0] * prod(shape[2:]) * prod(weight)


def rules_of(graph: Graph) -> Rules:
    """Follow the rows of a graph's inputs.

    Raises:
        NotCapturedError: if little of it goes row by row.
    """
    # Along the longest spatial dimension of every input that has one.
    dims = {}
    for index in range(graph.num_inputs):
        value, shape = graph.values[index], graph.values[index].shape
        if value.is_float and len(shape) >= _FEWEST_DIMENSIONS:
            dims[index] = max(range(2, len(shape)), key=lambda dim: (shape[dim], dim))
    found: dict[int, Local] = {}
    norms: dict[int, Norm] = {}
    convolutions: dict[int, Convolution] = {}
    for call in graph.calls:
        rule = local_rule(call, graph.values, dims)
        if rule is None:
            continue
        (out,) = call.outs
        if rule.statistics_of is not None and (read := norm_of(call, graph.values)):
            norms[out] = read
        if seen := convolution_of(call, graph.values, dims):
            convolutions[out] = seen
        found[out], dims[out] = rule, rule.dim
    rules = Rules(
        graph=graph,
        locals=found,
        call_of={out: call for call in graph.calls for out in call.outs},
        dims=dims,
        norms=norms,
        convolutions=convolutions,
    )
    _check_worth(rules)
    return rules


def _check_worth(rules: Rules) -> None:
    values, call_of = rules.graph.values, rules.call_of
    made = [index for index in rules.locals if call_of[index].name.startswith("conv")]
    if len(made) < _FEWEST_CONVOLUTIONS:
        _refuse("it has fewer than two convolutions whose rows can be followed")
    made_bytes = sum(values[index].num_bytes for index in made)
    other = [index for index in call_of if index not in rules.locals]
    if sum(values[index].num_bytes for index in other) > _MOST_OTHER * made_bytes:
        names = dict.fromkeys(call_of[each].name for each in other)
        _refuse(f"much of it cannot be computed row by row ({', '.join(names)})")


def _refuse(reason: str) -> NoReturn:
    raise NotCapturedError(reason)
