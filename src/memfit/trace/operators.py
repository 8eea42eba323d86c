"""What an operator costs: floating-point operations and bytes moved."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from memfit.trace.collectives import Exchange, exchange_of
from memfit.trace.events import Operation, Phase
from memfit.trace.subclasses import parts_of
from memfit.trace.uncounted_flops import UNCOUNTED

_NO_WORK = ("prim", "profiler")  # questions about a tensor (its device) and marks in a profile

_RENAMED = ("_unsafe_view", "_reshape_alias", "lift_fresh")
"""What torch doesn't call a view, though nothing is moved."""
_LOOK_UPS = ("embedding", "index", "index_select", "gather", "nll_loss_forward")
"""Their first argument is a table, of which they read what they give."""
_NO_EXCHANGE = Exchange(0, 0, 1)
_DROPOUT_RATES = ("dropout_p", "dropout")
_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is known of an operator before it is called."""

    name: str
    is_free: bool
    count_flops: Callable[..., int] | None


@functools.cache
def _kind(func: Any) -> _Kind:
    packet = getattr(func, "overloadpacket", func)
    return _Kind(
        name=str(packet).removeprefix("aten."),
        is_free=getattr(func, "is_view", False) or getattr(func, "namespace", "") in _NO_WORK,
        count_flops=_count_of(packet),
    )


def _count_of(packet: Any) -> Callable[..., int] | None:
    count: Callable[..., int] | None = flop_registry.get(packet) or UNCOUNTED.get(packet)
    return count


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
