"""Sees the batches that data loaders give, and which loaders do not train."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.utils.data import dataloader

_MOST_FRAMES = 12
"""How far up the stack the variable that holds a loader is looked for."""
_LEAST_PASS_STEPS = 8
"""A shorter pass says too little: what one adds, a list of a few steps may as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """One batch that is wanted from a loader."""

    stream: str
    """The loader's name."""
    number: int
    """Of the batch in its stream, from 1."""
    is_training: bool
    """Whether optimizers step between the batches of this loader."""


class Loaders:
    """Name loaders by the variables that hold them, and tell training from validation.

    A loader trains if an optimizer has stepped between two batches of one pass over it. Batches
    that it gives without gradients are validation all the same.
    """

    def __init__(self) -> None:
        self._passes: weakref.WeakKeyDictionary[Any, _Pass] = weakref.WeakKeyDictionary()
        self._training: set[str] = set()
        self._numbers: dict[str, int] = {}
        self._known: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._begun: dict[str, int] = {}
        """The number of steps when the last pass over each began."""

    def begin_pass(
        self, iterator: Any, loader: Any, frame: FrameType | None, num_steps: int = 0
    ) -> bool:
        """Learn which loader an iterator belongs to, and say whether a pass of training is over.

        Where batches of several loaders are taken in turns, the longest pass is that of training.
        """
        if loader not in self._known:
            name = _variable_name(loader, frame) or "loader"
            taken = set(self._known.values())
            number = next(n for n in range(1, len(taken) + 2) if _numbered(name, n) not in taken)
            self._known[loader] = _numbered(name, number)
        name = self._known[loader]
        length = num_steps - self._begun.get(name, num_steps)
        others = [
            num_steps - each.begun
            for each in self._passes.values()
            if each.name != name and each.name in self._training
        ]
        self._begun[name] = num_steps
        self._passes[iterator] = _Pass(name=name, begun=num_steps)
        is_long = length >= _LEAST_PASS_STEPS and length > max(others, default=0)
        return is_long and name in self._training

    def wanted(self, iterator: Any, num_steps: int) -> Fetch:
        """Note that the next batch is wanted."""
        current = self._passes.get(iterator) or _Pass(name="loader", begun=num_steps)
        name, has_gradients = current.name, torch.is_grad_enabled()
        before = current.num_steps
        if before is not None and before < num_steps and has_gradients:
            self._training.add(name)
        current.num_steps = num_steps
        is_training = has_gradients and name in self._training
        if not is_training:
            self._numbers[name] = self._numbers.get(name, 0) + 1
        return Fetch(stream=name, number=self._numbers.get(name, 0), is_training=is_training)


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One pass over a loader."""

    name: str
    begun: int
    """How many steps were done when it began."""
    num_steps: int | None = None
    """How many were done when the last batch was wanted."""


def hook_loaders(
    began: Callable[[Any, Any, FrameType], object],
    wanted: Callable[[Any], object],
    given: Callable[[Any, Any], object],
) -> None:
    """Have functions called when a loader is gone through, before each batch, and after."""
    kind: Any = dataloader._BaseDataLoaderIter
    begin, take = kind.__init__, kind.__next__

    def __init__(self: Any, loader: Any) -> None:  # noqa: N807 - takes the place of one
        begin(self, loader)
        began(self, loader, sys._getframe(1))

    def __next__(self: Any) -> Any:  # noqa: N807 - as above
        wanted(self)
        batch = take(self)
        given(self, batch)
        return batch

    kind.__init__, kind.__next__ = __init__, __next__


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"


def _variable_name(loader: Any, frame: FrameType | None) -> str:
    """Find the variable or attribute that holds a loader, outside torch."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return ""
        if not frame.f_globals.get("__name__", "").startswith("torch."):
            held = (*_items(frame.f_locals), *_items(_attributes(frame.f_locals.get("self"))))
            name = next((n for n, value in held if value is loader and n != "self"), "")
            if name:
                return name
        frame = frame.f_back
    return ""


def _items(names: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in names.items() if isinstance(name, str)]


def _attributes(thing: Any) -> dict[str, Any]:
    return getattr(thing, "__dict__", {})
