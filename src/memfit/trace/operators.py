"""What an operator costs: floating-point operations and bytes moved."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from memfit.trace.collectives import Exchange, exchange_of
from memfit.trace.events import Operation, Phase
from memfit.trace.subclasses import parts_of

_NO_WORK = ("prim", "profiler")  # questions about a tensor (its device) and marks in a profile

_RENAMED = ("_unsafe_view", "_reshape_alias", "lift_fresh")
"""What torch doesn't call a view, though nothing is moved."""
_LOOK_UPS = ("embedding", "index", "index_select", "gather", "nll_loss_forward")
"""Their first argument is a table, of which they read what they give."""
_NO_EXCHANGE = Exchange(0, 0, 1)
_DROPOUT_RATES = ("dropout_p", "dropout")
_NONE: Mapping[str, Any] = MappingProxyType({})
_MULTIPLY_ADD = 2
"""Operations of a product of two numbers that is added to a sum."""
_BACKWARD = 2
"""Backward multiplies twice: for the gradient of the input and for that of the weights."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is known of an operator before it is called."""

    name: str
    is_free: bool
    count_flops: Callable[..., int] | None


@functools.cache
def _kind(func: Any) -> _Kind:
    packet = getattr(func, "overloadpacket", func)
    count: Callable[..., int] | None = flop_registry.get(packet) or _UNCOUNTED.get(packet)
    return _Kind(
        name=str(packet).removeprefix("aten."),
        is_free=getattr(func, "is_view", False) or getattr(func, "namespace", "") in _NO_WORK,
        count_flops=count,
    )


def describe(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, phase: Phase
) -> Operation | None:
    """Describe one call of an operator; None for what costs nothing, such as views.

    Floating-point operations are counted by torch's own formulas (torch.utils.flop_counter), for
    matrix products, convolutions and attention, and by ours for attention on the CPU and recurrent
    layers; other operators are bound by the bytes they move.
    """
    kind = _kind(func)
    if kind.is_free:
        return None
    num_flops = int(kind.count_flops(*args, **kwargs, out_val=out)) if kind.count_flops else 0
    made, given = tensors_in(out), tensors_in(args)
    has_rows = any(tensor.is_sparse for tensor in (*made, *given))
    tensors = with_memory((out, args)) if has_rows else [*made, *given]
    layouts = [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in tensors]
    exchange = exchange_of(func, args) or _NO_EXCHANGE
    return Operation(
        kind.name,
        phase,
        str(tensors[0].dtype).removeprefix("torch.") if tensors else "float32",
        num_flops,
        _moved_bytes(kind.name, args, given, made, has_rows=has_rows),
        hash((func, *layouts)),
        is_random=draws(func, args, kwargs),
        sent_bytes=exchange.sent_bytes,
        num_ranks=exchange.num_ranks,
        num_nodes=exchange.num_nodes,
    )


def operator_name(func: Any) -> str:
    """Name an operator as recorded operations are named."""
    return _kind(func).name


def draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Test whether a call draws random numbers. With a rate of dropout that is zero it does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in _DROPOUT_RATES:
            given = args[position] if position < len(args) else argument.default_value
            return bool(kwargs.get(argument.name, given))
    return True


def changed_tensors(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] = _NONE
) -> Iterable[torch.Tensor]:
    """Yield the tensors that an operator changes in place, of the arguments that are given."""
    for place in written_arguments(func):
        if place < len(args):
            yield from tensors_in(args[place])
        elif kwargs:
            yield from tensors_in(kwargs.get(func._schema.arguments[place].name))


@functools.cache
def written_arguments(func: Any) -> tuple[int, ...]:
    """Return the places of the arguments that an operator writes to."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    return tuple(
        place
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def tensors_in(values: Any) -> list[torch.Tensor]:
    """List the tensors in nested tuples and lists, which is all that operators take and give."""
    if isinstance(values, torch.Tensor):
        return [values]
    found: list[torch.Tensor] = []
    if isinstance(values, (tuple, list)):
        for value in values:
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif isinstance(value, (tuple, list)):
                found += tensors_in(value)
    return found


def with_memory(values: Any) -> list[torch.Tensor]:
    """List the same, with indices and values in the place of sparse tensors."""
    tensors = tensors_in(values)
    if not any(tensor.is_sparse for tensor in tensors):
        return tensors
    return [part for tensor in tensors for part in parts_of(tensor)]


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _moved_bytes(
    name: str,
    args: tuple[Any, ...],
    given: Sequence[torch.Tensor],
    made: Sequence[torch.Tensor],
    *,
    has_rows: bool,
) -> int:
    """Count what is read and written: of a table that is looked up in, no more than is found.

    Of one that sparse rows are added to, or that is read where they lie, no more than these.
    """
    if name in _RENAMED:
        return 0
    if has_rows:
        return _bytes_beside_rows([*given, *made])
    out_bytes = _num_bytes(made)
    if name in _LOOK_UPS:
        table_bytes = _num_bytes(tensors_in(args[:1]))
        return min(table_bytes, out_bytes) + _num_bytes(given) - table_bytes + out_bytes
    return _num_bytes(given) + out_bytes


def _bytes_beside_rows(tensors: Sequence[torch.Tensor]) -> int:
    rows_bytes = _num_bytes(with_memory([tensor for tensor in tensors if tensor.is_sparse]))
    return sum(min(_num_bytes(with_memory(tensor)), rows_bytes) for tensor in tensors)


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Count scores and their sum of values, as torch does: a causal mask saves nothing."""
    return _pairs(query, key) * int(query.shape[-1] + value.shape[-1])


def _attention_backward(
    _gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any
) -> int:
    """Count the scores once more, and two products for each of forward's."""
    return _pairs(query, key) * int(3 * query.shape[-1] + 2 * value.shape[-1])


def _pairs(query: Any, key: Any) -> int:
    """Return twice the number of scores; heads of queries may share those of keys."""
    return _MULTIPLY_ADD * int(prod(query.shape[:-1])) * int(key.shape[-2])


def _layer(inputs: Any, first: Any, second: Any, *_: Any, **__: Any) -> int:
    """Count a layer whose weights are given one by one: those of the input, and the state's."""
    return _recurrent(inputs, (first, second))


def _layers(inputs: Any, weights: Sequence[Any], *_: Any, **__: Any) -> int:
    """Count layers whose weights, and biases among them, are given as a list."""
    return _recurrent(inputs, weights)


def _recurrent(inputs: Any, weights: Sequence[Any]) -> int:
    num_steps = int(prod(inputs.shape[:-1]))
    num_weights = sum(int(each.numel()) for each in weights if each.dim() > 1)
    return _MULTIPLY_ADD * num_steps * num_weights


def _twice(count: Callable[..., int]) -> Callable[..., int]:
    return lambda *args, **kwargs: _BACKWARD * count(*args, **kwargs)


_aten = torch.ops.aten
_UNCOUNTED: Mapping[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten.mkldnn_rnn_layer: _layer,
    _aten.mkldnn_rnn_layer_backward: _twice(_layer),
    _aten._cudnn_rnn: _layers,
    _aten._cudnn_rnn_backward: _twice(_layers),
}
"""By operator: how many operations a call with these arguments takes."""
