"""Tells draws of random numbers that begin where the step itself has set its generator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes

_SETS = (
    *((owner, "set_rng_state") for owner in (torch, torch.random)),
    *((torch.cuda, name) for name in ("manual_seed", "manual_seed_all", "set_rng_state")),
)
"""Functions that set a global generator and leave no trace on the one that recordings draw from."""

_NOBODYS_SEED = 0x6D656D_66697421


class DrawStates:
    """Follow generators from draw to draw; a piece of a batch goes on where the last one ended.

    Fake tensors draw nothing, so that a number is drawn from a generator in their place.

    Args:
        generators: that outlive the step, besides torch's own. One that is met otherwise was made
            by the step, and begins where it does so every time.
    """

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self._begins = [(each, each.get_state()) for each in (torch.default_generator, *generators)]
        self._states: dict[int, bytes] = {}
        self._last: dict[int, tuple[torch.Generator, Any]] = {}

    def draw(self, generator: torch.Generator | None, what: Any) -> bool:
        """Draw, and return whether the generator has been set since it was drawn from last.

        Args:
            generator: None for torch's own.
            what: is returned by ``set_at_last`` if it stays the last draw.
        """
        drawn_from = torch.default_generator if generator is None else generator
        was_set = self._is_set(drawn_from)
        with _disable_current_modes():
            torch.rand(1, generator=drawn_from, device=drawn_from.device)
        self._states[_key(drawn_from)] = _digest(drawn_from.get_state())
        self._last[_key(drawn_from)] = drawn_from, what
        return was_set

    def set_at_last(self) -> Iterator[Any]:
        """Yield each last draw whose generator has been set after it."""
        yield from (what for generator, what in self._last.values() if self._is_set(generator))

    def _is_set(self, generator: torch.Generator) -> bool:
        return self._states.get(_key(generator)) != _digest(generator.get_state())

    @contextmanager
    def watched(self) -> Iterator[None]:
        """See functions that set a global state, and put all states back at the end."""
        with ExitStack() as stack:
            for owner, name in _SETS:
                setting = self._noting(getattr(owner, name))
                stack.enter_context(patch.object(owner, name, setting))
            for generator, state in self._begins:
                stack.callback(generator.set_state, state)
                generator.manual_seed(_NOBODYS_SEED)  # it may stand just where the step sets it
                self._states[_key(generator)] = _digest(generator.get_state())
            yield

    def _noting(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        def set_state(*args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() == -1:  # what is computed again draws the same
                self._states.pop(_key(torch.default_generator), None)
            return usual(*args, **kwargs)

        return set_state


def _key(generator: torch.Generator) -> int:
    """Name a generator; operators are given another object for the same one."""
    return generator._cdata  # type: ignore[attr-defined, no-any-return]


def _digest(state: torch.Tensor) -> bytes:
    with _disable_current_modes():
        return bytes(state.tolist())
