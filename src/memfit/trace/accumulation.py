"""Puts right the places where watching a step changes its memory: adding up gradients.

Where a tensor feeds several operators, autograd adds the gradients that come back. Unwatched, it
adds in place when nothing else holds the first one; as soon as a dispatch mode is active it makes
a new tensor instead (``accumulate`` and ``can_accumulate_inplace`` in
torch/csrc/autograd/input_buffer.cpp, read at torch 2.13). Recorded as is, every residual connection
would cost one activation too much. Here the addition is done in place where autograd would have.

The gradients of ``gather``, indexing, ``max``, ``topk`` and their kin are made of zeros in
the same way: unwatched, values are scattered into them in place (``areAnyTensorSubclassLike`` in
torch/csrc/autograd/FunctionsManual.cpp and aten/src/ATen/native).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch

from memfit.trace.modes import OperatorMode

_ADD = torch.ops.aten.add.Tensor
_INDEX_PUT = torch.ops.aten.index_put.default
_IN_PLACE = {
    _ADD: torch.ops.aten.add_.Tensor,
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
    _INDEX_PUT: torch.ops.aten.index_put_.default,
}
_PLACE_OF_ACCUMULATE = 3
# Torch wraps every __torch_dispatch__ so that its compiler leaves it alone.
_WRAPPERS_OF_DISPATCH = ("eval_frame.py", "_compile.py")


def accumulate_in_place(func: Any, args: tuple[Any, ...]) -> torch.Tensor:
    """Add to the first gradient in place."""
    _IN_PLACE[func](*args)
    first: torch.Tensor = args[0]
    return first


def _is_sum(args: tuple[Any, ...]) -> bool:
    """Return whether two gradients of one shape are added."""
    if len(args) != 2 or not all(isinstance(arg, torch.Tensor) for arg in args):
        return False
    return bool(args[0].shape == args[1].shape) and not args[0].is_sparse


def _comes_from_engine(frame: FrameType | None) -> bool:
    """Return whether the autograd engine dispatched the operator, with no Python code between."""
    while frame is not None and frame.f_code.co_filename.endswith(_WRAPPERS_OF_DISPATCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _num_holders(args: tuple[Any, ...]) -> tuple[int, int]:
    """Count who holds the first gradient, and who holds its storage."""
    tensor = args[0]
    count = getattr(tensor, "_use_count", None)
    storage = tensor.untyped_storage()
    return (count() if count else 0, torch._C._storage_Use_Count(storage._cdata))


class Sums:
    """Tell which sums of a backward pass are autograd's own, and would be done in place unwatched.

    What the formula of one operator's gradient (``svd_backward``) has made for itself it adds to as
    it is written. Only where an operator got the same tensor twice (``x * x``) are two gradients
    that it has just made autograd's to add up.
    """

    def __init__(self) -> None:
        self._node = ("", 0)
        self._made: set[int] = set()

    def note(self, out: Any) -> None:
        """Hear of what an operator of the backward pass has made."""
        key = _key_of(torch._C._current_autograd_node())
        if key != self._node:
            self._node, self._made = key, set()
        if isinstance(out, torch.Tensor) and not out.is_sparse:
            self._made.add(out.untyped_storage()._cdata)

    def is_in_place(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Return whether an operator is such a sum.

        To be called directly from ``_dispatch`` of an ``OperatorMode``.
        """
        if func not in _IN_PLACE or not _comes_from_engine(sys._getframe(3)):
            return False
        if func is _INDEX_PUT:
            # With accumulation, autograd uses it for the gradient of indexing alone.
            return len(args) > _PLACE_OF_ACCUMULATE and bool(args[_PLACE_OF_ACCUMULATE])
        if func is _ADD and (not _is_sum(args) or self._is_of_a_formula(args[0])):
            return False
        return _num_holders(args) <= num_holders_when_exclusive()

    def _is_of_a_formula(self, first: torch.Tensor) -> bool:
        node = torch._C._current_autograd_node()
        if node is None or _key_of(node) != self._node:
            return False
        if first.untyped_storage()._cdata not in self._made:
            return False
        targets = [edge for edge in node.next_functions if edge[0] is not None]
        return len(set(targets)) == len(targets)


def _key_of(node: Any) -> tuple[str, int]:
    """Return what tells a node of the graph from others, without holding on to it."""
    return ("", 0) if node is None else (node.name(), node._sequence_nr())


class _Probe(OperatorMode):
    """Count the holders of a gradient that nothing but the engine holds."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: tuple[int, int] = (0, 0)

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func is _ADD:
            self.counts = max(self.counts, _num_holders(args))
        return func(*args, **kwargs)


@functools.cache
def num_holders_when_exclusive() -> tuple[int, int]:
    """Measure, once, the holders that the watching itself adds.

    To be called first from outside a dispatch, where autograd is at hand.
    """
    with torch.enable_grad():
        leaf = torch.ones(2, requires_grad=True)
        middle = leaf * 2.0
        total = (middle * 3.0).sum() + (middle * 5.0).sum()
        probe = _Probe()
        # Not under the caller's modes: the count of a plain gradient is wanted.
        with torch.utils._python_dispatch._disable_current_modes(), probe:
            total.backward()
    return probe.counts
