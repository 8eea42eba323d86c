"""Keeps what a module changes besides its results as one call on all rows would leave it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from memfit.forward_state import Before, ForwardState, Left
from memfit.strategies.cached_gradients.rows import CannotCutError


class CallEffects:
    """The effects of one call: every piece starts from the same state, and one outcome is kept.

    That is what one call on all rows leaves, if the outcome does not depend on the rows (the power
    iteration of spectral norm, counters). Generators of random numbers move on from piece to piece.

    Args:
        state: of the module.
        arguments: of the call, which it may change as well.
    """

    def __init__(self, state: ForwardState, arguments: Sequence[Any]) -> None:
        self._state = state
        self._start = state.before(*arguments)
        self._left: Left | None = None
        self._has_run = False

    def piece(self, run: Callable[[Before], Any]) -> Any:
        """Run a piece; ``run`` is given what there is before it.

        Raises:
            CannotCutError: if it leaves something else than the pieces before it; then everything
                is as it was before the call.
        """
        before = self._start
        if self._has_run:
            self._start.put_back()
            before = self._start.with_generators_here()
        self._has_run = True
        result = self._state.run(self._start, lambda: run(before))
        if self._left is None:
            self._left = Left(self._start)
        elif name := self._left.first_difference():
            self._start.put_back()
            self._start.positions.put_back()
            raise CannotCutError(
                f"what it leaves in {name} depends on the rows, as with running statistics and "
                "codebooks, so pieces would leave something else"
            )
        return result


def carried_out_and_undone(
    state: ForwardState, arguments: Sequence[Any], call: Callable[[], Any]
) -> Any:
    """Carry something out and put back what it changed, random generators included."""
    before = state.before(*arguments)
    try:
        return state.run(before, call)
    finally:
        before.put_back()
        before.positions.put_back()
