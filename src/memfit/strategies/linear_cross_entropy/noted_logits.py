"""Notes which linear layers of a step have outputs that go into cross-entropy, and nowhere before.

Nothing is changed: tensors that are logits are remembered, and followed from call to call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from memfit.strategies.linear_cross_entropy.logit_views import (
    HEAD_CALLS,
    LOSSES,
    Logits,
    View,
    asks_for_no_values,
    can_be_chunked,
    head_of,
    view_of,
)
from memfit.trace.modes import FunctionMode


@dataclass(frozen=True, slots=True, kw_only=True)
class NotedHead:
    """A linear layer whose outputs went into a cross-entropy that can be computed in chunks."""

    num_rows: int
    num_classes: int


_NOTES: ContextVar[list[NotedHead] | None] = ContextVar("memfit_noted_heads", default=None)


@contextmanager
def noted_heads() -> Iterator[list[NotedHead]]:
    """Collect a note of every such layer inside this block, in order."""
    notes: list[NotedHead] = []
    token = _NOTES.set(notes)
    try:
        with _Following():
            yield notes
    finally:
        _NOTES.reset(token)


def note_head(logits: Logits) -> None:
    """Tell the surrounding `noted_heads` block, if there is one, of logits that become a loss."""
    notes = _NOTES.get()
    if notes is not None:
        num_rows = math.prod(logits.row_shape)
        notes.append(NotedHead(num_rows=num_rows, num_classes=logits.num_classes))


@dataclass(slots=True)
class _Origin:
    """One linear call, and whether its logits have been used for something else."""

    is_used: bool = False


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a tensor of logits."""

    class_dim: int
    is_log: bool
    origin: _Origin


class _Following(FunctionMode):
    """Follows logits from the layer that makes them to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self._known = WeakIdKeyDictionary()

    def _call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func in HEAD_CALLS and head_of(func, args, kwargs) is not None:
            out = func(*args, **kwargs)
            self._known[out] = _Known(out.dim() - 1, is_log=False, origin=_Origin())
            return out
        if not self._known or asks_for_no_values(func, args):
            return func(*args, **kwargs)
        known = self._known_in(args, kwargs)
        view = self._follow(known, func, args, kwargs) if known else None
        out = func(*args, **kwargs)
        if view is not None:
            self._known[out] = _Known(view.class_dim % out.dim(), view.is_log, known[0].origin)
        return out

    def _known_in(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Known]:
        """Look for logits among arguments."""
        tensors = (leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor))
        found = (self._known.get(tensor) for tensor in tensors)
        return [known for known in found if known is not None]

    def _follow(
        self, known: Sequence[_Known], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> View | None:
        """Return how a call keeps logits; note a loss, and any other use."""
        first = self._known.get(args[0]) if args and isinstance(args[0], Tensor) else None
        view, is_loss = None, False
        if first is not None and len(known) == 1 and torch.is_grad_enabled():
            logits = Logits(
                shape=tuple(args[0].shape),
                class_dim=first.class_dim,
                dtype=args[0].dtype,
                device=args[0].device,
                is_log=first.is_log,
            )
            view = view_of(func, logits, args[1:], kwargs)
            is_loss = func in LOSSES and can_be_chunked(func, logits, *args[1:], **kwargs)
            if is_loss and not first.origin.is_used:
                note_head(logits)
        if view is None and not is_loss:
            for each in known:
                each.origin.is_used = True
        return view
