"""Runs a forward several times for one step, and leaves behind what one forward would have left.

Of effects that do not depend on the batch (a counter, the power iteration of spectral norm, a
teacher that follows the weights) every forward of a step finds what the first one found, and leaves
the same. Of others (running statistics, a state kept between steps, a queue of features) each piece
leaves something else than the whole batch would; that is an error, by name. Random generators are
left alone: each piece draws numbers of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from memfit.errors import StrategyError
from memfit.forward_state import Before, ForwardState, Left

if TYPE_CHECKING:
    from memfit.session.session import Session


class CarriedEffects:
    """Carry what forwards change from step to step, whatever the number of forwards in a step.

    Args:
        session: whose forwards.
        strategy: on whose behalf, for errors.
        overwritten: names that each forward sets anew and none reads before; they may differ.
        repeats_draws: whether forwards of one piece have to draw the same random numbers. Those of
            torch's own generators are the caller's matter; draws from others are an error.

    Raises:
        StrategyError: if a forward may read what it would not find again, such as a file.
    """

    def __init__(
        self,
        session: Session,
        strategy: str,
        *,
        overwritten: Collection[str] = (),
        repeats_draws: bool = False,
    ) -> None:
        roots = {"model": session.model, "loss": session.job.loss}
        self._state = ForwardState(roots, strategy)
        self._strategy = strategy
        self._overwritten, self._repeats_draws = overwritten, repeats_draws
        self._before: Before | None = None
        self._left: Left | None = None
        self._has_run = False
        if self._state.obstacle is not None:
            reason = (
                f"the forward would be run for each piece of a batch, and {self._state.obstacle}"
            )
            raise StrategyError(strategy, reason)

    def begin_step(self) -> None:
        """Keep what there is before the first forward of a step."""
        self._before, self._left = self._state.before(), None
        self._has_run = False

    def run_part(self, forward: Callable[[], Any]) -> Any:
        """Run a forward, to its end or half way, from where the first one of the step began.

        Raises:
            StrategyError: if it draws random numbers that could not be drawn again.
        """
        assert self._before is not None, "a step has begun"
        if self._has_run:
            self._before.put_back()
        self._has_run = True
        try:
            return self._state.run(self._before, forward)
        finally:
            if self._repeats_draws and (source := self._before.positions.first_moved()):
                reason = (
                    f"the forward draws from {source}, and all passes over a piece would have to "
                    "draw the same. Draw from torch's global generator."
                )
                raise StrategyError(self._strategy, reason)

    def end_piece(self) -> None:
        """Look at what a whole piece has left behind, in forward and backward.

        Raises:
            StrategyError: if that is something else than the piece before it left.
        """
        assert self._before is not None, "a step has begun"
        if self._left is None:
            self._left = Left(self._before)
        elif name := self._left.first_difference(self._overwritten):
            reason = (
                f"each piece leaves {name} in another state, one that depends on its samples, so "
                "pieces of a batch would train something else. Keep it out of the forward, or save "
                "memory with activation-checkpointing, which leaves it right."
            )
            raise StrategyError(self._strategy, reason)

    def end_step(self) -> None:
        """Leave behind what one forward over the whole batch would have left."""
        if self._left is not None:
            self._left.put_back()
        self._before = self._left = None
