"""Follows the numbers that autograd keeps: the ``0.5`` of ``x * 0.5`` is a tensor until backward.

Torch makes a tensor of no dimensions of a Python number, on the host, and the gradient of a product
or a quotient keeps it (``mul.Tensor``, ``div.Tensor`` in tools/autograd/derivatives.yaml, torch
2.13). No dispatch shows that tensor, and hooks on saved tensors leave it out. How long it lives is
known from the node that keeps it: until it has run in backward.

Not followed: numbers of a graph that is kept after backward (``retain_graph``), which are let go
too early; of a gradient that is differentiated again some are kept until the step ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memfit.trace.modules import Place

_ATEN = torch.ops.aten
_KEEPING = frozenset(
    {
        _ATEN.mul.Tensor,
        _ATEN.mul_.Tensor,
        _ATEN.div.Tensor,
        _ATEN.div_.Tensor,
    }
)
_BYTES = {bool: 1, int: 8, float: 8, complex: 16}
"""By kind of number, the bytes of the tensor that torch makes of it (c10/core/ScalarType.h)."""


def kept_number_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes of the number that an operator keeps for its gradient; 0 if it keeps none.

    To be called below autograd, while the operator is dispatched.
    """
    if func not in _KEEPING:
        return 0
    num_bytes = _BYTES.get(type(args[1]), 0)
    return num_bytes if num_bytes and args[0].requires_grad and torch.is_grad_enabled() else 0


class SavedNumbers:
    """Keep account of the numbers that are alive.

    Args:
        hold: notes memory of so many bytes, made by an operator at a place; returns its index.
        events: takes -1 - index for memory that has ended, as a trace has it.
        is_counted: whether the host's memory is counted; else nothing is noted.
    """

    def __init__(
        self,
        hold: Callable[[int, str, Place], int],
        events: list[int],
        *,
        is_counted: bool,
    ) -> None:
        self._hold, self._events, self._is_counted = hold, events, is_counted
        self._of_forward: dict[int, int] = {}
        self._of_recomputation: dict[int, int] = {}

    def before_result(
        self, func: Any, args: tuple[Any, ...], place: Place, *, in_backward: bool
    ) -> None:
        """Note what an operator keeps, before memory is made for its result."""
        is_recomputed = in_backward and torch.is_grad_enabled()
        if in_backward and not is_recomputed:
            self._end_recomputation()
        num_bytes = kept_number_bytes(func, args) if self._is_counted else 0
        if num_bytes:
            kept = self._of_recomputation if is_recomputed else self._of_forward
            # The node was made before the operator was dispatched, so its number is one behind.
            node = torch._C._autograd._get_sequence_nr() - 1
            kept[node] = self._hold(num_bytes, func.overloadpacket.__name__, place)

    def after_operator(self, *, in_backward: bool) -> None:
        """Let go of the number of the node that an operator of backward has been run for."""
        if not (self._of_forward or self._of_recomputation):
            return
        if not in_backward or torch.is_grad_enabled():
            return
        node = torch._C._current_autograd_node()
        for kept in (self._of_forward, self._of_recomputation):
            allocation = None if node is None else kept.pop(node._sequence_nr(), None)
            if allocation is not None:
                self._events.append(-1 - allocation)

    def end(self) -> None:
        """Let go of what is left: numbers of nodes that never ran."""
        for kept in (self._of_forward, self._of_recomputation):
            self._clear(kept)

    def _end_recomputation(self) -> None:
        """Let go of what a finished recomputation has kept.

        Where the recomputed graph is itself run backward (``use_reentrant=True``), its nodes let
        their numbers go one by one, as others do.
        """
        if self._of_recomputation:
            node = torch._C._current_autograd_node()
            if node is None or node._sequence_nr() < min(self._of_recomputation):
                self._clear(self._of_recomputation)

    def _clear(self, kept: dict[int, int]) -> None:
        for allocation in kept.values():
            self._events.append(-1 - allocation)
        kept.clear()
