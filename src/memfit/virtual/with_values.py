"""Fake tensors for scripts as they are: what host data determines is known, the rest assumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.utils._mode_utils import no_dispatch

from memfit.trace.operators import tensors_in
from memfit.virtual.assumptions import Assumptions
from memfit.virtual.cuda.placement import CARD
from memfit.virtual.host_draws import HostDraws, draws_numbers
from memfit.virtual.known_values import (
    NOT_KNOWN,
    Arguments,
    KnownValues,
    are_known,
    is_assumed,
    is_worth_computing,
    value_of,
)
from memfit.virtual.sequences import sequences
from memfit.virtual.tensors import ITEM, VirtualTensors

_ATEN = torch.ops.aten
_MASKED = {
    _ATEN.index.Tensor: 1,
    _ATEN.index_put.default: 1,
    _ATEN.index_put_.default: 1,
    _ATEN._index_put_impl_.default: 1,
    _ATEN._unsafe_index.Tensor: 1,
}
"""Operators that take masks as indices, and the place of the list."""
_LIFTS = (_ATEN.lift_fresh.default, _ATEN.lift.default, _ATEN.lift_fresh_copy.default)
_MASK_TYPES = (torch.bool, torch.uint8)
_NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


class TensorsWithValues(VirtualTensors):
    """Make fake tensors, keep the values of host data beside them, and assume the others.

    Args:
        has_card: whether there is a virtual GPU.
        assumptions: makes up the answers for what is not known.
        draws: moves the host's random generator on; None does so as a real run would.
    """

    def __init__(
        self,
        *,
        has_card: bool = False,
        assumptions: Assumptions,
        draws: HostDraws | None = None,
    ) -> None:
        super().__init__(has_card=has_card, assumptions=assumptions)
        self._assumptions = assumptions
        self._values = KnownValues()
        self._draws = draws or HostDraws()

    @property
    def draws_are_true(self) -> bool:
        """Return whether the host's random generator stands where that of a real run would."""
        return self._draws.is_true

    def replacements(self) -> Iterator[Any]:
        """Yield what reads values without an operator of its own."""
        yield patch.object(torch.nn.init, "_no_grad_trunc_normal_", self._draws.truncated)
        yield patch.object(torch.Tensor, "numpy", self._array)
        yield patch.object(torch.Tensor, "tolist", self._list)
        yield patch.object(FakeTensor, "tolist", self._list)
        yield patch.object(torch.Tensor, "__format__", self._text)
        yield from sequences()
        # Libraries tell by addresses which tensors share memory.
        yield patch.object(FakeTensor, "data_ptr", _address)
        yield patch.object(torch.UntypedStorage, "data_ptr", _address_of_storage)

    def _make(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> Any:
        if self.in_kernel_invocation or (self._draws.is_inside and draws_numbers(func)):
            return super()._make(func, types, args, kwargs)
        if func is ITEM:
            return self._number(cast(torch.Tensor, args[0]))
        tensors = tensors_in((args, tuple(kwargs.values())))
        known = self._values.arguments(args, kwargs) if are_known(tensors) else None
        if known is not None and self._stays_real(func, tensors, kwargs):
            values = self._values.run(func, known)
            if values is not NOT_KNOWN:
                return values
        try:
            with self._draws.inside():
                out = super()._make(func, types, self._without_masks(func, args), kwargs)
        except _NEEDS_VALUES:
            return self._made_of_values(func, args, kwargs, known)
        if known is None or not is_worth_computing(func, out):
            self._draws.follow(func, args, kwargs, out)
            self._values.forget_changed(func, args, kwargs)
            self._assume(func, args, out)
            return out
        values = self._values.run(func, known)
        if values is NOT_KNOWN:
            self._values.forget_changed(func, args, kwargs)
            return out
        return self._with_values(args, out, values, [id(each) for each in tensors])

    def _stays_real(
        self, func: Any, tensors: Sequence[torch.Tensor], kwargs: Mapping[str, object]
    ) -> bool:
        """Return whether an operator is really run: on data that the script itself has on the host.

        Beside a card the host is real. Without one the host is the device: what is made there is
        counted, and only what changes the script's own data is really done. What ``torch.tensor``
        makes may become a parameter, which has to be fake.
        """
        if not tensors or any(isinstance(each, FakeTensor) for each in tensors):
            return False
        if func._schema.is_mutable:
            return True
        return self._has_card and func not in _LIFTS and kwargs.get("device") != CARD

    def _with_values(
        self, args: Sequence[object], out: Any, values: Any, own: Sequence[int]
    ) -> Any:
        """Keep values beside results; an argument that is real and was changed is the result."""
        if isinstance(values, torch.Tensor) and id(values) in own:
            return next(each for each in tensors_in(args) if each is values)
        self._values.attach(out, values)
        for fake in tensors_in(out):
            if isinstance(fake, FakeTensor):
                fake.constant = None  # torch's own copy of the values would be a second truth
        return out

    def _number(self, tensor: torch.Tensor) -> Any:
        value = value_of(tensor)
        if value is None and isinstance(tensor, FakeTensor) and tensor.constant is not None:
            value = tensor.constant
        if value is None:
            return self._assumptions.number(tensor)
        with no_dispatch():
            number = value.item()
        if is_assumed(tensor):
            self._assumptions.note("number", str(number))
        return number

    def _without_masks(self, func: Any, args: Sequence[object]) -> Sequence[object]:
        """Put indices in the place of masks, whose number torch's fake versions cannot know."""
        place = _MASKED.get(func)
        if place is None or not any(_is_mask(each) for each in cast(Any, args[place])):
            return args
        indices: list[Any] = []
        for each in cast(Any, args[place]):
            indices += self._indices_of(each) if _is_mask(each) else [each]
        return (*args[:place], indices, *args[place + 1 :])

    def _indices_of(self, mask: torch.Tensor) -> list[torch.Tensor]:
        count = self._num_true(mask)
        with self:
            return [
                torch.empty(count, dtype=torch.int64, device=mask.device) for _ in range(mask.dim())
            ]

    def _num_true(self, mask: torch.Tensor) -> int:
        value = value_of(mask)
        if value is None:
            return self._assumptions.num_true(mask)
        with no_dispatch():
            count = int(torch.count_nonzero(value))
        if is_assumed(mask):
            words = "as uneven as can be" if self._assumptions.is_skewed else "evenly spread"
            self._assumptions.note("choice", words, decides_sizes=True)
        return count

    def _made_of_values(
        self,
        func: Any,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        known: Arguments | None,
    ) -> Any:
        """Make results whose sizes depend on values."""
        if known is None:
            return self._of_assumed_size(func, args, kwargs)
        values = self._values.run(func, known)
        if values is NOT_KNOWN:
            return self._of_assumed_size(func, args, kwargs)
        tensors = list(tensors_in((args, tuple(kwargs.values()))))
        if any(is_assumed(tensor) for tensor in tensors):
            self._assumptions.note(str(func), "what earlier answers gave", decides_sizes=True)
        device = tensors[0].device if tensors else torch.device("cpu")
        out = self._like(values, device)
        self._values.attach(out, values)
        return out

    def keep_values(self, fake: torch.Tensor, values: torch.Tensor) -> None:
        """Keep real values, of the same shape, beside a fake tensor."""
        self._values.attach(fake, values)

    def with_known_values(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a tensor of a device that has the values of a real one.

        Args:
            value: a real tensor of the host, of any shape; it is kept, not copied.
            device: where the fake one lies.
        """
        if self._has_card and device.type == "cpu":
            return value  # beside a card the host is real
        out: torch.Tensor = self._like(value, device)
        self._values.attach(out, value)
        return out

    def _like(self, values: Any, device: torch.device) -> Any:
        """Return fake tensors of the shapes of real ones."""
        if isinstance(values, (tuple, list)):
            return type(values)(self._like(each, device) for each in values)
        if not isinstance(values, torch.Tensor):
            return values
        with self:
            return torch.empty_strided(
                values.shape, values.stride(), dtype=values.dtype, device=device
            )

    def _of_assumed_size(
        self, func: Any, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Any:
        """Make results of a size that nobody knows, where a bound is at hand."""
        rule = _SIZES.get(func)
        if rule is None:
            raise DynamicOutputShapeException(func)
        with self:
            return rule(self._num_true, *args, **kwargs)

    def _assume(self, func: Any, args: Sequence[Any], out: Any) -> None:
        """Give choices among unknown scores, and questions whether they are finite, an answer."""
        truth = self._assumptions.comparison(func, args)
        if truth is not None and is_worth_computing(func, out):
            with no_dispatch():
                self._values.assume(out, torch.full(out.shape, truth))
            return
        if not is_worth_computing(func, out):
            return
        with no_dispatch():
            found = self._assumptions.indices(func, args, out)
        results = out if isinstance(out, (tuple, list)) else (out,)
        for place, indices in found.items():
            self._values.assume(results[place], indices.to(results[place].dtype))

    def _host_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of a tensor that is read as a whole."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        value = value_of(tensor)
        if value is None:
            with no_dispatch():
                return self._assumptions.values(tensor)
        if is_assumed(tensor):
            self._assumptions.note("values", "what earlier answers gave")
        return value

    @property
    def _array(self) -> Callable[..., Any]:
        def array(tensor: torch.Tensor, *, force: bool = False) -> Any:
            with no_dispatch():
                if not isinstance(tensor, FakeTensor):
                    return _array_as_torch_gives_it(tensor, force=force)
                if tensor.requires_grad and not force:
                    raise RuntimeError(_NEEDS_GRAD)
                if tensor.fake_device == CARD and not force:
                    raise TypeError(_ON_CARD)
            values = self._host_values(tensor)
            with no_dispatch():
                return np.asarray(_array_as_torch_gives_it(values, force=True))

        return array

    @property
    def _list(self) -> Callable[..., Any]:
        def as_list(tensor: torch.Tensor) -> Any:
            values = self._host_values(tensor)
            with no_dispatch():
                return _list_as_torch_gives_it(values.detach())

        return as_list

    @property
    def _text(self) -> Callable[..., Any]:
        def text(tensor: torch.Tensor, format_spec: str) -> str:
            if isinstance(tensor, FakeTensor) and tensor.dim() == 0:
                return str(format(tensor.item(), format_spec))
            return str(_text_as_torch_gives_it(tensor, format_spec))

        return text


_array_as_torch_gives_it = torch.Tensor.numpy
_list_as_torch_gives_it = torch.Tensor.tolist
_text_as_torch_gives_it = torch.Tensor.__format__
_NEEDS_GRAD = (
    "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
)
_ON_CARD = (
    "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
    "host memory first."
)


_address_as_torch_gives_it = torch.UntypedStorage.data_ptr


def _address_of_storage(storage: torch.UntypedStorage) -> int:
    """Return an address that no other living storage has; nothing lies there."""
    if storage.device.type == "meta":
        return int(storage._cdata)
    return _address_as_torch_gives_it(storage)


def _address(tensor: torch.Tensor) -> int:
    start = int(tensor.untyped_storage()._cdata)
    return start + int(tensor.storage_offset()) * tensor.element_size()


def _is_mask(index: object) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in _MASK_TYPES


def _nonzero(num_true: Callable[[torch.Tensor], int], mask: torch.Tensor) -> torch.Tensor:
    return torch.empty(num_true(mask), mask.dim(), dtype=torch.int64, device=mask.device)


def _masked_select(
    num_true: Callable[[torch.Tensor], int], tensor: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    return torch.empty(num_true(mask), dtype=tensor.dtype, device=tensor.device)


_SIZES: Mapping[Any, Callable[..., torch.Tensor]] = {
    _ATEN.nonzero.default: _nonzero,
    _ATEN.masked_select.default: _masked_select,
}


def with_values(assumptions: Assumptions) -> Callable[..., VirtualTensors]:
    """Return what makes the mode with these assumptions."""

    def make(*, has_card: bool) -> VirtualTensors:
        return TensorsWithValues(has_card=has_card, assumptions=assumptions)

    return make
