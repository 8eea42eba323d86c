"""Makes the fake results of an operator again that was called before, in fewer steps than torch.

A step calls the same operators on the same shapes again and again: block by block, step by step,
plan by plan. Torch keeps what their results look like (``FakeTensorMode.cache``), but looks it up
and makes a fake tensor of it in a hundred calls of Python. What torch has answered from its cache
once is answered from here from then on: under the same key, with a tensor that looks the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memfit.trace.operators import tensors_in
from memfit.virtual.cache_keys import append_key

_MODE = "fake_mode"
_HOST = torch.device("cpu")
"""Whose dispatch keys the virtual card's tensors have too."""
_DEVICES = ("cpu", "cuda")
_TRACING = torch._C._TorchDispatchModeKey.PROXY
_make_subclass = torch.Tensor._make_subclass
_PLAIN = (type(None), bool, int, torch.device)
"""Of what a fake tensor says of itself besides its mode."""
Key = tuple[object, ...]


class _UnusualError(Exception):
    """Say that an argument has no short description."""


@dataclass(frozen=True, slots=True)
class _Argument:
    """A result that is an argument, changed in place."""

    place: int

    def make(self, args: Sequence[object], _mode: FakeTensorMode) -> object:
        """Return it."""
        return args[self.place]


@dataclass(frozen=True, slots=True)
class _Look:
    """What a fake tensor looks like, and the argument whose memory it lies in."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    of_argument: int | None
    attributes: Mapping[str, object]

    def make(self, args: Sequence[object], mode: FakeTensorMode) -> object:
        """Make such a tensor."""
        if self.of_argument is None:
            bare = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        else:
            bare = torch.empty(0, dtype=self.dtype, device="meta")
            viewed = cast(FakeTensor, args[self.of_argument]).untyped_storage()
            bare.set_(viewed, self.offset, self.shape, self.stride)
        found = _make_subclass(
            FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=_HOST
        )
        if mode._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(found)
        else:
            torch._C._set_throw_on_mutable_data_ptr(found)
        own = vars(found)
        own.update(self.attributes)
        own[_MODE] = mode
        return found


_Part = _Argument | _Look | None


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How to make all results of an operator."""

    parts: tuple[_Part, ...]
    kind: type | None
    """Of the sequence of them; None for a single one."""

    def make(self, args: Sequence[object], mode: FakeTensorMode) -> object:
        """Make them as they were made before."""
        with torch._C._DisableTorchDispatch():
            made = [part if part is None else part.make(args, mode) for part in self.parts]
        return made[0] if self.kind is None else self.kind(made)


def key_of(
    mode: FakeTensorMode, func: Any, args: Sequence[object], kwargs: Mapping[str, object]
) -> Key | None:
    """Return what an operator's fake results depend on; None where that cannot be said in short.

    The same as torch's own key says (``FakeTensorMode._cache_key``), for arguments of usual kinds.
    """
    key: list[object] = [
        func,
        torch.get_default_dtype(),
        torch._C._get_default_device(),
        torch.is_inference_mode_enabled(),
        torch._C._get_dispatch_mode(_TRACING) is None,
    ]
    try:
        append_key(key, args, mode, _refuse)
        if kwargs:
            key += kwargs
            append_key(key, kwargs.values(), mode, _refuse)
        known = tuple(key)
        hash(known)
    except (_UnusualError, TypeError):
        return None
    return known


def made_again(key: Key, args: Sequence[object], mode: FakeTensorMode) -> Any:
    """Return the fake results that belong to a key; ``NotImplemented`` where none are known."""
    recipe = _recipes().get(key)
    return NotImplemented if recipe is None else recipe.make(args, mode)


def learn(key: Key, args: Sequence[object], kwargs: Mapping[str, object], out: object) -> None:
    """Keep what an operator's results look like, which torch has answered from its cache."""
    kind = type(out) if type(out) in (tuple, list) else None
    results = cast(Sequence[object], (out,) if kind is None else out)
    nested = (*(each for each in args if not isinstance(each, FakeTensor)), *kwargs.values())
    given = {_storage_of(each) for each in tensors_in(nested)}
    parts = [_part(each, args, given) for each in results]
    if NotImplemented not in parts:
        _recipes()[key] = _Recipe(tuple(cast(list[_Part], parts)), kind)


def _part(result: object, args: Sequence[object], given: set[int]) -> Any:
    """Return how to make a result again; ``NotImplemented`` for one of an unusual kind.

    Args:
        result: of an operator.
        args: of the operator.
        given: the storages of its other arguments, to which what the earlier results lie in is
            added.
    """
    if result is None:
        return None
    if type(result) is not FakeTensor:
        return NotImplemented
    for place, argument in enumerate(args):
        if argument is result:
            return _Argument(place)
    attributes = {name: value for name, value in vars(result).items() if name != _MODE}
    storage = _storage_of(result)
    if (
        not all(isinstance(value, _PLAIN) for value in attributes.values())
        or storage in given
        or _is_special(result)
    ):
        return NotImplemented
    viewed = [isinstance(each, FakeTensor) and _storage_of(each) == storage for each in args]
    if not any(viewed):
        given.add(storage)
    return _Look(
        tuple(result.shape),
        tuple(result.stride()),
        result.dtype,
        int(result.storage_offset()),
        viewed.index(True) if any(viewed) else None,
        attributes,
    )


def _storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_special(tensor: FakeTensor) -> bool:
    return (
        tensor.fake_device.type not in _DEVICES
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.requires_grad
        or tensor.is_inference()
        or tensor._has_symbolic_sizes_strides
    )


def _refuse(_argument: object) -> None:
    raise _UnusualError


@cache
def _recipes() -> dict[Key, _Recipe]:
    """Return what is known in this process, as torch's own cache is one of the process."""
    return {}
