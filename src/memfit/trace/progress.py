"""Tells whoever wants to know how far a recording has come, so that it can be given up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Told = Callable[[int], None]
WHO_IS_TOLD: ContextVar[Told] = ContextVar("who_is_told", default=lambda _: None)


@contextmanager
def told_of_operators(told: Told) -> Iterator[None]:
    """Have every recorder that is made inside tell how many operators it has, after each.

    What is raised then ends the recording. It has to be no ``Exception``, which the code that is
    recorded may catch.
    """
    token = WHO_IS_TOLD.set(told)
    try:
        yield
    finally:
        WHO_IS_TOLD.reset(token)
