"""Tells which optimizer's step ends a training step, where there are several."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Hashable
from functools import cache
from types import FrameType
from typing import Any, cast

from torch.optim import Optimizer


class StepEnds:
    """Find the ends of training steps among the steps of optimizers.

    The first optimizer seen leads: each of its steps ends a training step, and those of others
    between belong to the next. An optimizer that steps twice while the leader does not takes the
    lead, so that a leader used only at the beginning does not end the record. One that steps for
    the first time when the leader has done so twice begins a training of its own, or another part
    of the same one, and takes the lead at once: an optimizer of a GAN would have been there before.
    """

    def __init__(self) -> None:
        self._leader: weakref.ref[Optimizer] | None = None
        self._num_leaders = 0
        self._num_led = 0
        """How many steps the leader has ended."""
        self._others: set[int] = set()
        """The ids of those that have stepped since the leader did."""
        self._known: dict[int, weakref.ref[Optimizer]] = {}
        """All that have stepped, by their ids."""

    def is_end(self, optimizer: Optimizer) -> bool:
        """Return whether this step of an optimizer ends a training step."""
        is_new = self._is_new(optimizer)
        leader = None if self._leader is None else self._leader()
        if optimizer is not leader:
            takes_lead = leader is None or (is_new and self._num_led >= 2)
            if not takes_lead and id(optimizer) not in self._others:
                self._others.add(id(optimizer))
                return False
            self._leader, self._num_led = weakref.ref(optimizer), 0
            self._num_leaders += 1
        self._others.clear()
        self._num_led += 1
        return True

    @property
    def has_new_leader(self) -> bool:
        """Return whether the latest step that ended was the first of one that took over."""
        return self._num_leaders > 1 and self._num_led == 1

    def _is_new(self, optimizer: Optimizer) -> bool:
        """Note that an optimizer steps, and return whether it has not done so before."""
        known = self._known.get(id(optimizer))
        if known is not None and known() is optimizer:
            return False
        self._known[id(optimizer)] = weakref.ref(optimizer)
        return True


_STEP_CODE = Optimizer.profile_hook_step(Optimizer.step).__code__
"""Of the function that torch puts around every ``step`` method, and that calls the hooks."""


def is_inside_own_step(optimizer: Any) -> bool:
    """Test whether a hook is called by a ``step`` that another ``step`` of the same object called.

    A subclass that extends ``step`` has the hooks called twice: by its own and by its parent's.
    """
    if not _extends_step(cast(Hashable, type(optimizer))):
        return False
    num_steps = 0
    current: FrameType | None = sys._getframe(1)
    while current is not None:
        if current.f_code is _STEP_CODE and current.f_locals.get("self") is optimizer:
            num_steps += 1
            if num_steps == 2:
                return True
        current = current.f_back
    return False


@cache
def _extends_step(kind: Hashable) -> bool:
    """Return whether a class has a ``step`` on top of another one that does something.

    Torch puts its wrapper around a parent's ``step`` into the class itself, so what is wrapped is
    compared.
    """
    classes = [each for each in inspect.getmro(cast(type, kind)) if each is not Optimizer]
    steps = {inspect.unwrap(vars(each)["step"]) for each in classes if "step" in vars(each)}
    return len(steps) > 1
