"""Autocast as CUDA does it, for tensors of the virtual card.

The card's tensors carry the CPU's dispatch keys, so autocast meets them at the CPU's autocast key.
While a step is recorded, CUDA's operator lists take the places of the CPU's there, with the cache
of weights that CUDA keeps (``cached_cast`` in aten/src/ATen/autocast_mode.cpp, torch 2.13).
"""

from __future__ import annotations

import functools
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any
from unittest.mock import patch

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from memfit.kernels.cuda.card import as_version

Kernel = Callable[..., Any]
_KEY = "AutocastCPU"
_AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU)
POLICIES = (
    "lower_precision",
    "fp32",
    "fp32_set_opt_dtype",
    "fp32_append_dtype",
    "promote",
    "banned",
)


class VirtualAutocast:
    """Cast what CUDA's autocast would cast."""

    def __init__(self, torch_version: tuple[int, ...]) -> None:
        self._lists = autocast_lists(torch_version)
        self._copies = WeakIdKeyDictionary()

    def replacements(self) -> Iterator[Any]:
        """Yield the replacements that switch this autocast on and off with torch's own."""
        switch = torch.set_autocast_enabled
        clear = torch.clear_autocast_cache

        def set_enabled(*args: Any) -> None:
            switch(*args)
            if args[0] == "cuda":
                torch._C._dispatch_tls_set_dispatch_key_excluded(
                    DispatchKey.AutocastCPU, not args[1]
                )

        def clear_cache() -> None:
            clear()
            self._copies.clear()

        yield patch.object(torch, "set_autocast_enabled", set_enabled)
        yield patch.object(torch, "clear_autocast_cache", clear_cache)

    def register(self, library: torch.library.Library) -> None:
        """Put CUDA's lists at the CPU's autocast key for as long as a library lives."""
        kernels = dict(self._kernels())
        with warnings.catch_warnings():
            # Torch tells that its own kernels are overridden, which is what is wanted.
            warnings.simplefilter("ignore")
            for name in sorted({*kernels, *_cpu_operators()}):
                kernel = kernels.get(name, torch.library.fallthrough_kernel)
                library.impl(name, kernel, _KEY, allow_override=True)

    def _kernels(self) -> Iterator[tuple[str, Kernel]]:
        """Yield a kernel for every operator on CUDA's lists that this torch knows."""
        lists = self._lists
        makers = (
            (lists.lower_precision, self._lower_precision),
            (lists.fp32, self._fp32),
            (lists.fp32_set_opt_dtype, self._fp32_by_dtype),
            (lists.fp32_append_dtype, self._fp32),
            (lists.promote, self._promoted),
        )
        for names, make in makers:
            for name in names:
                plain = name.removeprefix("aten::")
                op = operator_called(plain)
                if op is not None:
                    yield plain, make(op)
        for name in lists.banned:
            if (op := operator_called(name.removeprefix("aten::"))) is not None:
                yield name.removeprefix("aten::"), self._banned(op)

    def _lower_precision(self, op: Any) -> Kernel:
        return self._casting(op, lambda _args: torch.get_autocast_dtype("cuda"))

    def _fp32(self, op: Any) -> Kernel:
        return self._casting(op, lambda _args: torch.float32)

    def _banned(self, op: Any) -> Kernel:
        """Refuse what CUDA's autocast refuses."""

        def kernel(*args: Any, **kwargs: Any) -> Any:
            if torch.is_autocast_enabled("cuda") and args[0].is_cuda:
                raise RuntimeError(f"{op} is unsafe to autocast; see the docs of torch.autocast")
            with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
                return op(*args, **kwargs)

        return kernel

    def _promoted(self, op: Any) -> Kernel:
        return self._casting(op, _widest)

    def _casting(self, op: Any, choose: Callable[[Any], torch.dtype]) -> Kernel:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
                if not torch.is_autocast_enabled("cuda"):
                    return op(*args, **kwargs)
                dtype = choose((args, kwargs))
                cast = functools.partial(self._cast, dtype=dtype)
                args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
                return op(*args, **kwargs)

        return kernel

    def _fp32_by_dtype(self, op: Any) -> Kernel:
        """Ask for a result in fp32, unless the caller has asked for a dtype."""
        place = next(
            (i for i, argument in enumerate(op._schema.arguments) if argument.name == "dtype"), None
        )

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
                asked = kwargs.get("dtype") is not None or (
                    place is not None and len(args) > place and args[place] is not None
                )
                if torch.is_autocast_enabled("cuda") and not asked and _is_eligible(args[0]):
                    args = args if place is None else args[:place]
                    kwargs = {**kwargs, "dtype": torch.float32}
                return op(*args, **kwargs)

        return kernel

    def _cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Cast a tensor; weights that are cast to the lower precision are kept for the region."""
        if not _is_eligible(tensor) or tensor.dtype is dtype:
            return tensor
        is_leaf = tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
        is_weight = is_leaf and tensor.dtype is torch.float32
        lower = torch.get_autocast_dtype("cuda")
        if not (is_weight and dtype is lower and torch.is_autocast_cache_enabled()):
            return tensor.to(dtype)
        if tensor not in self._copies:
            self._copies[tensor] = tensor.to(dtype)
        copy: torch.Tensor = self._copies[tensor]
        return copy


@functools.cache
def operator_called(name: str) -> Any:
    """Find an operator overload by its name, such as ``norm.Scalar``; None if there is none."""
    packet_name, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, packet_name, None)
    return None if packet is None else getattr(packet, overload or "default", None)


@functools.cache
def _cpu_operators() -> frozenset[str]:
    """List the operators that the CPU's autocast treats, as torch registered them."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(_KEY)
    return frozenset(
        name.removeprefix("aten::")
        for name in names
        if name.startswith("aten::") and operator_called(name.removeprefix("aten::")) is not None
    )


def _is_eligible(tensor: object) -> bool:
    """Return whether autocast touches a tensor: floating-point, on the card, not fp64."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.is_cuda
        and tensor.is_floating_point()
        and tensor.dtype is not torch.float64
    )


def _widest(arguments: Any) -> torch.dtype:
    """Return the widest dtype among the arguments, at least the lower precision."""
    dtype = torch.get_autocast_dtype("cuda")
    for tensor in torch.utils._pytree.tree_leaves(arguments):
        if _is_eligible(tensor):
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class _AutocastLists:
    """The operators of each policy, as the dispatcher names them.

    The lists are data (``data/autocast.toml``); this module reads them and applies the changes of
    each version, so that a new torch needs a line of data and no code.

    ``aten::addmm`` is a default overload, ``aten::pow.Tensor_Scalar`` a named one.
    """

    lower_precision: frozenset[str]
    """Cast eligible inputs to the autocast dtype."""
    fp32: frozenset[str]
    """Cast eligible inputs to float32."""
    fp32_set_opt_dtype: frozenset[str]
    """Set ``dtype=float32`` unless the caller gave one."""
    fp32_append_dtype: frozenset[str]
    """Call the overload that takes a dtype, with float32."""
    promote: frozenset[str]
    """Cast inputs to the widest dtype among them."""
    banned: frozenset[str]
    """Refuse under autocast."""

    def policy_of(self, operator: str) -> str | None:
        """Return the policy of an operator, or None where autocast leaves it alone."""
        return next((policy for policy in POLICIES if operator in getattr(self, policy)), None)

    def operators(self) -> frozenset[str]:
        """Return every operator that autocast treats."""
        return frozenset().union(*(getattr(self, policy) for policy in POLICIES))


@cache
def autocast_lists(torch_version: tuple[int, ...]) -> _AutocastLists:
    """Return CUDA's autocast lists as of a torch version such as ``(2, 13)``.

    Versions before the oldest one read get the oldest lists, later ones the newest.

    Source: ``data/autocast.toml`` names the files and threads.
    """
    document = _document()
    lists: dict[str, set[str]] = {policy: set(document[policy]) for policy in POLICIES}
    for change in document["changes"]:
        if as_version(change["since"]) <= tuple(torch_version[:2]):
            lists[change["policy"]].update(change.get("added", ()))
            lists[change["policy"]].difference_update(change.get("removed", ()))
    return _AutocastLists(**{policy: frozenset(names) for policy, names in lists.items()})


@cache
def _document() -> Mapping[str, Any]:
    """Read the data file."""
    data = resources.files(__package__) / "data" / "autocast.toml"
    return tomllib.loads(data.read_text(encoding="utf-8"))
