"""Keeps the values of host data beside fake tensors, so that unchanged code can look at them.

A fake tensor has no values. Those of data that the host brings (token ids, lengths, masks, labels,
indices of a sampler) are known all the same: they are kept as a real tensor beside the fake one,
and what is computed from known values alone is computed for real as well. Values that depend on
parameters or on large random draws are unknown.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_flatten, tree_unflatten

from memfit.trace.operators import changed_tensors, tensors_in
from memfit.units import MIB

_MOST_BYTES = 64 * MIB
"""Of results that are computed for real: more than token ids and masks take, less than weights."""
_MOST_RANDOM_NUMBERS = 4096
"""Drawn for real: coin flips and schedules, but no weights."""
VALUE = "_memfit_value"
_ASSUMED = "_memfit_assumed"
_HOST = torch.device("cpu")
_DETACH = torch.ops.aten.detach.default
_UNINITIALISED = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)
_STORAGES = (torch.UntypedStorage, torch.TypedStorage)
NOT_KNOWN = object()

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def value_of(tensor: object) -> torch.Tensor | None:
    """Return the known values of a tensor, on the host; None where they are unknown.

    Args:
        tensor: a fake tensor, or a real one, which is its own value.
    """
    if isinstance(tensor, FakeTensor):
        # A parameter is about to change; what it began with is no value to rely on.
        return None if tensor.requires_grad else vars(tensor).get(VALUE)
    if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and not tensor.is_sparse:
        return None if tensor.requires_grad else tensor
    return None


def are_known(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether the values of all tensors are known."""
    for tensor in tensors:  # noqa: SIM110 - asked for every operator; a generator takes longer
        if value_of(tensor) is None:
            return False
    return True


def is_assumed(tensor: torch.Tensor) -> bool:
    """Return whether the known values of a tensor rest on an assumption."""
    value = value_of(tensor)
    return value is not None and _ASSUMED in vars(value)


class KnownValues:
    """Compute for real what depends on known values alone."""

    def __init__(self) -> None:
        self._holders: dict[int, list[weakref.ref[FakeTensor]]] = {}

    def arguments(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Arguments | None:
        """Return an operator's arguments with values in the place of fake tensors.

        None where a value is unknown.
        """
        leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
        values: list[object] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                value = value_of(leaf)
                if value is None:
                    return None
                values.append(value)
            elif isinstance(leaf, _STORAGES):
                return None  # that of a fake tensor has no memory
            elif isinstance(leaf, torch.device):
                values.append(_HOST)
            else:
                values.append(leaf)
        found_args, found_kwargs = tree_unflatten(values, spec)
        if "pin_memory" in found_kwargs:
            found_kwargs["pin_memory"] = False
        return found_args, found_kwargs

    def run(self, func: Any, known: Arguments) -> Any:
        """Run an operator on values; ``NOT_KNOWN`` where the host cannot."""
        with ExitStack() as stack:
            stack.enter_context(no_dispatch())
            stack.enter_context(torch.no_grad())
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(mode=False))
            try:
                out = func(*known[0], **known[1])
            except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):
                return NOT_KNOWN
            if func in _UNINITIALISED:
                out.zero_()  # what happens to lie in memory would give another answer each time
        if any(_ASSUMED in vars(each) for each in tensors_in((known[0], tuple(known[1].values())))):
            for each in tensors_in(out):
                vars(each)[_ASSUMED] = True
        return out

    def attach(self, out: object, values: object) -> None:
        """Keep values beside the fake tensors that stand for them."""
        for fake, value in zip(tensors_in(out), tensors_in(values), strict=False):
            if not isinstance(fake, FakeTensor) or vars(fake).get(VALUE) is value:
                continue
            if fake.shape == value.shape:
                vars(fake)[VALUE] = value
                key = value.untyped_storage()._cdata
                self._holders.setdefault(key, []).append(weakref.ref(fake, self._dropper(key)))

    def assume(self, fake: torch.Tensor, value: torch.Tensor) -> None:
        """Give a fake tensor values that are an assumption."""
        vars(value)[_ASSUMED] = True
        self.attach(fake, value)

    def forget_changed(
        self, func: Any, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        """Forget the values of what an operator has changed in place to something unknown."""
        for tensor in changed_tensors(func, tuple(args), kwargs):
            value = vars(tensor).get(VALUE) if isinstance(tensor, FakeTensor) else None
            if value is not None:
                self._forget(value.untyped_storage()._cdata)

    def _forget(self, key: int) -> None:
        """Forget all values that lie in one storage."""
        for holder in self._holders.pop(key, ()):
            fake = holder()
            value = None if fake is None else vars(fake).get(VALUE)
            # Another value may have come since, and another storage to the same place.
            if fake is not None and value is not None and value.untyped_storage()._cdata == key:
                del vars(fake)[VALUE]

    def _dropper(self, key: int) -> Callable[[weakref.ref[FakeTensor]], None]:
        def drop(holder: weakref.ref[FakeTensor]) -> None:
            held = self._holders.get(key)
            if held is not None:
                held[:] = [each for each in held if each is not holder]
                if not held:
                    del self._holders[key]

        return drop


def is_worth_computing(func: Any, out: object) -> bool:
    """Return whether results are small enough to be computed for real."""
    tensors = list(tensors_in(out))
    if getattr(func, "is_view", False) or func is _DETACH:
        return True
    if func in _UNINITIALISED:
        return sum(each.numel() * each.element_size() for each in tensors) <= MIB
    if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
        is_index = all(not each.is_floating_point() for each in tensors)
        most = _MOST_BYTES // 8 if is_index else _MOST_RANDOM_NUMBERS
        return all(each.numel() <= most for each in tensors)
    return sum(each.numel() * each.element_size() for each in tensors) <= _MOST_BYTES
