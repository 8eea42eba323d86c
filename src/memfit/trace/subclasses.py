"""Takes tensor subclasses apart: what they are made of takes memory, and they do not.

A wrapper says that it has a storage of its nominal size, in which nothing lies. DTensor, the
optimizer states of torchao and nested tensors are wrappers. Torch has a protocol for them:
``__tensor_flatten__`` names the tensors inside (torch/utils/_python_dispatch.py, torch 2.13).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memfit.errors import OpaqueTensorError

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor})
_WITHOUT_PROTOCOL: Mapping[tuple[str, str], tuple[str, ...]] = MappingProxyType(
    {("torch.masked.maskedtensor.core", "MaskedTensor"): ("_masked_data", "_masked_mask")}
)
"""What wrappers are made of that do not follow torch's protocol, by module and class."""
_COMPRESSED: Mapping[torch.layout, tuple[str, str]] = MappingProxyType(
    {
        torch.sparse_csr: ("crow_indices", "col_indices"),
        torch.sparse_bsr: ("crow_indices", "col_indices"),
        torch.sparse_csc: ("ccol_indices", "row_indices"),
        torch.sparse_bsc: ("ccol_indices", "row_indices"),
    }
)


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory of their own that a tensor consists of; often it alone.

    Wrappers inside wrappers are taken apart as well, and so are sparse tensors.

    Raises:
        OpaqueTensorError: if a wrapper does not say what it is made of.
    """
    kind = type(tensor)
    if kind in _PLAIN or issubclass(kind, FakeTensor):
        if tensor.layout is torch.strided:
            yield tensor
        else:
            yield from _parts_of_sparse(tensor)
        if kind not in _PLAIN:
            yield from statistics_of(tensor)
    elif (names := inside_of(tensor)) is not None:
        for name in names:
            inside = getattr(tensor, name, None)
            if isinstance(inside, torch.Tensor):
                yield from parts_of(inside)
    elif is_hollow(tensor):
        raise OpaqueTensorError(kind)
    else:
        yield tensor
        yield from statistics_of(tensor)


def statistics_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield what a packed weight of bitsandbytes needs to be unpacked; of others nothing.

    Scales, the table of the codes, and with double quantisation the offset, scales and table of the
    scales lie beside the weight, in its ``quant_state`` (functional.py, bitsandbytes 0.50.2).
    """
    state = vars(tensor).get("quant_state")
    while state is not None:
        for name in ("absmax", "code", "offset"):
            if isinstance(each := getattr(state, name, None), torch.Tensor):
                yield each
        state = getattr(state, "state2", None)


def inside_of(tensor: Any) -> tuple[str, ...] | None:
    """Name the attributes in which a wrapper holds tensors; None for all that is no wrapper."""
    kind = type(tensor)
    if hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__"):
        names, _ = tensor.__tensor_flatten__()
        return tuple(names)
    for base in kind.__mro__:
        known = _WITHOUT_PROTOCOL.get((base.__module__, base.__qualname__))
        if known is not None:
            return known
    return None


@functools.cache
def carries_itself_out(kind: type) -> bool:
    """Return whether a class carries operators out by itself, on the tensors inside.

    A mode leaves such operators to the class, and then sees what is done inside.
    """
    if issubclass(kind, FakeTensor):
        return False
    own: Any = getattr(kind, "__torch_dispatch__", None)
    return own is not torch.Tensor.__torch_dispatch__


def is_left_to_a_class(types: Iterable[type]) -> bool:
    """Return whether one of an operator's tensors carries it out by itself.

    To be asked for every operator, whose tensors are all fake but for rare ones.
    """
    for kind in types:  # noqa: SIM110 - a generator would take ten times as long
        if kind is not FakeTensor and carries_itself_out(kind):
            return True
    return False


def is_hollow(tensor: torch.Tensor) -> bool:
    """Return whether a tensor only says that it has memory, as wrappers do.

    Their storages are made without memory (``make_tensor_for_subclass_helper`` in
    torch/csrc/autograd/python_variable.cpp, torch 2.13); those of fake tensors lie on meta.
    """
    if not carries_itself_out(type(tensor)):
        return False
    storage = torch.Tensor.untyped_storage(tensor)
    if storage.device.type == "meta":
        return False
    try:
        return storage.nbytes() > 0 and storage.data_ptr() == 0
    except RuntimeError:  # torch has no address for storages that it made without memory
        return True


def known_parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the same as ``parts_of``, and nothing for a wrapper that does not say.

    For looking on where a step is really run: there the allocator is what is asked for bytes.
    """
    try:
        return tuple(parts_of(tensor))
    except OpaqueTensorError:
        return ()


def check_can_be_taken_apart(tensor: torch.Tensor) -> None:
    """Refuse a wrapper that does not say what it is made of.

    Raises:
        OpaqueTensorError: if it does not.
    """
    for _ in parts_of(tensor):
        pass


def _parts_of_sparse(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        yield tensor._indices()
        yield tensor._values()
    elif tensor.layout in _COMPRESSED:
        for name in _COMPRESSED[tensor.layout]:
            yield getattr(tensor, name)()
        yield tensor.values()
    else:
        yield tensor
