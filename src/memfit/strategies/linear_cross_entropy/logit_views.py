"""Tells logits from other tensors: the linear calls that make them, and the calls that keep them.

A call keeps logits when it only rearranges, picks or casts them, so that doing that to the rows of
the linear layer's input, and multiplying and casting afterwards, gives the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memfit.session.forwards import is_recomputed_later
from memfit.session.gathered import starts_backward

_FEWEST_CLASSES = 1024
_MOST_INSIDE = 4
"""Outputs per input of the widest layers inside usual models; logits have more."""
_REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A linear call that makes logits: ``hidden @ weight.T + bias``."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    @property
    def num_classes(self) -> int:
        """Count the outputs."""
        return self.weight.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """What calls on logits have to know of them."""

    shape: tuple[int, ...]
    class_dim: int
    dtype: torch.dtype
    device: torch.device
    is_log: bool
    """Whether they are normalised already: logarithms of probabilities."""

    @property
    def has_classes_last(self) -> bool:
        """Return whether the last dimension is that of the classes."""
        return self.class_dim == len(self.shape) - 1

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Return the shape without the classes."""
        return self.shape[: self.class_dim] + self.shape[self.class_dim + 1 :]

    @property
    def num_classes(self) -> int:
        """Count the classes."""
        return self.shape[self.class_dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a call does that keeps logits."""

    on_rows: Callable[[Tensor], Tensor]
    """The same done to the layer's input, whose last dimension are the features."""
    class_dim: int
    """Where the classes are afterwards; -1 for last."""
    dtype: torch.dtype
    is_log: bool


def head_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Head | None:
    """Read a linear call that is trained and has many outputs off its arguments, if it is one."""
    find = HEAD_CALLS.get(func)
    if find is None or _must_be_computed():
        return None
    head = find(*args, **kwargs)
    if head is None or head.hidden.dim() < 1 or head.hidden.shape[-1] != head.weight.shape[1]:
        return None
    tensors = [each for each in (head.hidden, head.weight, head.bias) if each is not None]
    if not any(each.requires_grad for each in tensors):
        return None
    dtypes = {each.dtype for each in tensors}
    may_differ = torch.is_autocast_enabled(head.hidden.device.type)
    is_usual = all(dtype.is_floating_point for dtype in dtypes) and torch.float64 not in dtypes
    return head if len(dtypes) == 1 or (may_differ and is_usual) else None


def view_of(
    func: Any, logits: Logits, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> View | None:
    """Return what a call does to logits; None if it does not keep them.

    Args:
        func: what is called on them.
        logits: the logits.
        args: its other arguments.
        kwargs: its keyword arguments.
    """
    rule = VIEWS.get(func)
    return None if rule is None else rule(logits, *args, **kwargs)


def can_be_chunked(
    func: Any,
    logits: Logits,
    labels: Any,
    *,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,  # noqa: ARG001 - any will do
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> bool:
    """Test whether a loss of logits can be computed in chunks, from the call's other arguments."""
    is_known = size_average is reduce is None and reduction in _REDUCTIONS
    if not is_known or not 0.0 <= label_smoothing <= 1.0 or logits.is_log != (func is F.nll_loss):
        return False
    has_labels = isinstance(labels, Tensor) and labels.dtype is torch.int64
    if not has_labels or tuple(labels.shape) != logits.row_shape:
        return False
    # The loss takes classes from the second dimension, or from the only one.
    if logits.class_dim != min(1, len(logits.shape) - 1):
        return False
    return weight is None or (weight.shape == (logits.num_classes,) and not weight.requires_grad)


def _must_be_computed() -> bool:
    """Return whether logits are to be computed here and now.

    Without gradients nothing is saved. A checkpointed region is run again in backward, where
    nothing is put off, and has to save the same tensors in the same order.
    """
    if not torch.is_grad_enabled():
        return True
    return is_recomputed_later() or torch._C._are_functorch_transforms_active()


def _of_linear(input: Any, weight: Any, bias: Any = None) -> Head | None:  # noqa: A002 - torch's
    if not all(_is_ordinary(each) for each in (input, weight)) or weight.dim() != 2:
        return None
    if not (bias is None or _is_ordinary(bias)) or not _has_many_classes(*weight.shape):
        return None
    return Head(hidden=input, weight=weight, bias=bias)


def _of_product(input: Any, other: Any, **options: Any) -> Head | None:  # noqa: A002 - torch's
    if options or not all(_is_ordinary(each) for each in (input, other)) or other.dim() != 2:
        return None
    if not _has_many_classes(other.shape[1], other.shape[0]):
        return None
    return Head(hidden=input, weight=other.t(), bias=None)


def _has_many_classes(num_classes: int, num_features: int) -> bool:
    return num_classes >= _FEWEST_CLASSES and num_classes > _MOST_INSIDE * num_features


def _is_ordinary(value: Any) -> bool:
    """Test whether a value is a tensor without a type of its own, which may mean something else."""
    return type(value) in {Tensor, torch.nn.Parameter} or isinstance(value, FakeTensor)


HEAD_CALLS: Mapping[Any, Callable[..., Head | None]] = MappingProxyType(
    {
        F.linear: _of_linear,
        torch.matmul: _of_product,
        torch.mm: _of_product,
        Tensor.matmul: _of_product,
        Tensor.mm: _of_product,
        Tensor.__matmul__: _of_product,
    }
)
"""The calls that may make logits."""


def _kept(logits: Logits, on_rows: Callable[[Tensor], Tensor], **changed: Any) -> View:
    """Describe a call that changes nothing but what is named."""
    same = {"class_dim": logits.class_dim, "dtype": logits.dtype, "is_log": logits.is_log}
    return View(on_rows=on_rows, **{**same, **changed})


def _unchanged(rows: Tensor) -> Tensor:
    return rows


def _contiguous(logits: Logits, memory_format: Any = torch.contiguous_format) -> View | None:
    return _kept(logits, _unchanged) if memory_format == torch.contiguous_format else None


def _float(logits: Logits) -> View | None:
    return _cast(logits, torch.float32)


def _cast(logits: Logits, dtype: torch.dtype) -> View | None:
    """Take logits to float32, in which losses can be computed whatever made the logits."""
    if dtype is logits.dtype:
        return _kept(logits, _unchanged)
    if dtype is not torch.float32 or logits.is_log:
        return None
    return _kept(logits, _unchanged, dtype=dtype)


def _to(logits: Logits, *args: Any, **kwargs: Any) -> View | None:
    """Take a dtype, a device where the logits are already, or both."""
    wanted = [*args, *(value for name, value in kwargs.items() if name != "non_blocking")]
    dtype = logits.dtype
    for value in wanted:
        if isinstance(value, torch.dtype):
            dtype = value
        elif not isinstance(value, (str, torch.device)) or not _is_at(logits.device, value):
            return None
    return _cast(logits, dtype)


def _is_at(place: torch.device, device: torch.device | str) -> bool:
    device = torch.device(device)
    return device.type == place.type and device.index in {None, place.index}


def _reshaped(logits: Logits, *sizes: Any, shape: Any = None) -> View | None:
    wanted = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes
    wanted = list(wanted if shape is None else shape)
    if not logits.has_classes_last or not wanted or any(type(n) is not int for n in wanted):
        return None
    num_known = math.prod(n for n in wanted[:-1] if n != -1)
    if wanted[-1] == -1 and num_known:
        wanted[-1] = math.prod(logits.shape) // num_known
    if wanted[-1] != logits.num_classes:
        return None
    return _kept(logits, lambda rows: rows.reshape(*wanted[:-1], rows.shape[-1]), class_dim=-1)


def _flattened(logits: Logits, start_dim: int = 0, end_dim: int = -1) -> View | None:
    num_dims = len(logits.shape)
    start, end = start_dim % num_dims, end_dim % num_dims
    if not logits.has_classes_last or not start <= end < logits.class_dim:
        return None
    return _kept(logits, lambda rows: rows.flatten(start, end), class_dim=-1)


def _transposed(logits: Logits, dim0: int, dim1: int) -> View | None:
    order = list(range(len(logits.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permuted(logits, order)


def _permuted(logits: Logits, *sizes: Any, dims: Any = None) -> View | None:
    order = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes
    order = [dim % len(logits.shape) for dim in (order if dims is None else dims)]
    if sorted(order) != list(range(len(logits.shape))):
        return None
    of_rows = [dim - (dim > logits.class_dim) for dim in order if dim != logits.class_dim]
    return _kept(
        logits,
        lambda rows: rows.permute(*of_rows, len(of_rows)),
        class_dim=order.index(logits.class_dim),
    )


def _indexed(logits: Logits, index: Any) -> View | None:
    """Take an index that picks rows and leaves the classes alone."""
    parts = index if isinstance(index, tuple) else (index,)
    num_used = [_num_dims_used(part) for part in parts]
    if not parts or not logits.has_classes_last or None in num_used:
        return None
    is_full = isinstance(parts[-1], slice) and parts[-1] == slice(None)
    has_gap = any(part is Ellipsis for part in parts[:-1])
    reaches_classes = has_gap or sum(n or 0 for n in num_used) == len(logits.shape)
    if reaches_classes and not is_full:
        return None
    return _kept(logits, lambda rows: rows[parts], class_dim=-1)


def _num_dims_used(part: Any) -> int | None:
    """Count the dimensions that a part of an index picks from; None if it is not understood."""
    if part is None or part is Ellipsis:
        return 0
    if type(part) is int or isinstance(part, slice):
        return 1
    if not _is_ordinary(part) or part.is_floating_point():
        return None
    return part.dim() if part.dtype is torch.bool else 1


def _logarithms(
    logits: Logits, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> View | None:
    """Normalise over the classes."""
    is_over_classes = type(dim) is int and dim % len(logits.shape) == logits.class_dim
    if not is_over_classes or type(_stacklevel) is not int or logits.is_log:
        return None
    # Whether autocast computes this in a wider type differs by device.
    if torch.is_autocast_enabled(logits.device.type) and logits.dtype is not torch.float32:
        return None
    view = _cast(logits, dtype or logits.dtype)
    return None if view is None else replace(view, is_log=True)


VIEWS: Mapping[Any, Callable[..., View | None]] = MappingProxyType(
    {
        Tensor.contiguous: _contiguous,
        Tensor.float: _float,
        Tensor.to: _to,
        Tensor.view: _reshaped,
        Tensor.reshape: _reshaped,
        torch.reshape: _reshaped,
        Tensor.flatten: _flattened,
        torch.flatten: _flattened,
        Tensor.transpose: _transposed,
        torch.transpose: _transposed,
        Tensor.permute: _permuted,
        torch.permute: _permuted,
        Tensor.__getitem__: _indexed,
        F.log_softmax: _logarithms,
        torch.log_softmax: _logarithms,
        Tensor.log_softmax: _logarithms,
    }
)
"""The calls that may keep logits."""

LOSSES = (F.cross_entropy, F.nll_loss)
"""The calls that take logits, and their logarithms, to a loss."""


def _getter(name: str) -> Any:
    """Return the function that torch names when a tensor's attribute is read."""
    return getattr(Tensor, name).__get__


ABOUT_SHAPE = frozenset(
    {
        *map(_getter, ("shape", "ndim", "dtype", "layout", "requires_grad", "is_leaf", "grad_fn")),
        _getter("_base"),
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.element_size,
        Tensor.is_floating_point,
        torch.is_floating_point,
        Tensor.__len__,
        Tensor.__hash__,
    }
)
"""Calls that ask for nothing but the shape and kind of a tensor."""
ABOUT_PLACE = MappingProxyType(
    {_getter(name): name for name in ("device", "is_cuda", "is_cpu", "is_meta")}
)
"""Calls that ask where a tensor is, and the attribute that answers."""


def asks_for_no_values(func: Any, args: Sequence[Any]) -> bool:
    """Return whether a call leaves values alone: it asks for a shape, or waits for backward."""
    if func in ABOUT_SHAPE or func in ABOUT_PLACE:
        return True
    return func is Tensor.register_hook and len(args) > 1 and starts_backward(args[1])
