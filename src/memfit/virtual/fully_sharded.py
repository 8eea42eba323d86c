"""FSDP on fake tensors: torch's own code, told where storages lie, without the others' shards.

``FullyShardedDataParallel`` asks for devices by number and for addresses of storages, which fake
tensors on a build without CUDA do not have. Everything else, its streams and frees included, is as
torch does it.

Source: torch/distributed/fsdp/_init_utils.py, _flat_param.py and _common_utils.py, torch 2.13.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch

from memfit.trace.events import Category
from memfit.trace.purposes import tell_purpose
from memfit.virtual.cuda.placement import CARD

_PACKAGE = "torch.distributed.fsdp"


def fully_sharded() -> Iterator[Any]:
    """Yield the replacements with which ``FullyShardedDataParallel`` runs on fake tensors."""
    wrapper = torch.distributed.fsdp.FullyShardedDataParallel
    yield patch.object(wrapper, "__init__", _with_device_named(wrapper.__init__))
    setup = importlib.import_module(f"{_PACKAGE}._init_utils")
    for name, on_card in (
        ("_get_device_from_device_id", _names_the_card),
        ("_get_compute_device", _asks_the_card),
    ):
        yield patch.object(setup, name, _card_if(on_card, getattr(setup, name)))
    yield patch.object(setup, "_materialize_meta_module", _made_there(setup))
    flat = importlib.import_module(f"{_PACKAGE}._flat_param")
    running = importlib.import_module(f"{_PACKAGE}._runtime_utils")
    for module in (flat, running):
        yield patch.object(module, "_no_dispatch_record_stream", _nothing)
    yield patch.object(flat, "_alloc_storage", _told_of(flat._alloc_storage))
    yield patch.object(flat, "_same_storage", _same_storage)
    yield patch.object(flat, "_data_ptr_allocated", _has_memory)
    sharding = importlib.import_module(f"{_PACKAGE}._fully_shard._fsdp_param")
    yield patch.object(sharding, "_chunk_with_empty", Chunks)


def _with_device_named(init: Callable[..., Any]) -> Callable[..., Any]:
    """Spell a device that is given by its number."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def make(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        if type(given.arguments.get("device_id")) is int:
            given.arguments["device_id"] = CARD
        init(*given.args, **given.kwargs)

    return make


def _card_if(is_meant: Callable[..., bool], find: Callable[..., Any]) -> Callable[..., Any]:
    """Answer with the card where it is meant, whose number C++ would not know."""

    @functools.wraps(find)
    def found(*args: Any) -> Any:
        return CARD if is_meant(*args) else find(*args)

    return found


def _names_the_card(device_id: Any, *_others: Any) -> bool:
    return isinstance(device_id, torch.device) and device_id.type == CARD.type


def _asks_the_card(*args: Any) -> bool:
    return args[-1] is torch.cuda


def _made_there(setup: Any) -> Callable[..., Any]:
    """Make parameters without memory on the card, where no device is named."""
    materialize = setup._materialize_meta_module

    @functools.wraps(materialize)
    def make(module: Any, device: Any, ignored: Any, handle: Any) -> Any:
        return materialize(
            module, device or (CARD if handle is torch.cuda else None), ignored, handle
        )

    return make


def _told_of(allocate: Callable[..., Any]) -> Callable[..., Any]:
    """Say what the flat parameters are for that FSDP takes memory for, and gives back."""

    def take(tensor: torch.Tensor, shape: Any) -> Any:
        result = allocate(tensor, shape)
        tell_purpose(tensor, Category.GATHERED_PARAMETERS)
        return result

    return take


class Chunks(Sequence[torch.Tensor]):
    """The chunks of a tensor, each made when it is asked for.

    ``fully_shard`` cuts a parameter into those of all ranks, to take its own and the size of the
    first: with 512 ranks that is most of what there is to do. Source: ``_chunk_with_empty`` of
    torch/distributed/fsdp/_fully_shard/_fsdp_common.py; ``torch.chunk`` rounds sizes up.
    """

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._num_chunks, self._dim = tensor, num_chunks, dim
        self._length = -(-tensor.shape[dim] // num_chunks)

    def __len__(self) -> int:
        return self._num_chunks

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._num_chunks))]
        position = range(self._num_chunks)[index] * self._length
        size = self._tensor.shape[self._dim]
        if position >= size and position:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, position, min(self._length, size - position))


def _same_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Tell by identity: fake storages have no addresses."""
    return bool(first.untyped_storage()._cdata == second.untyped_storage()._cdata)


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > 0


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing: fake tensors are used on no stream."""
