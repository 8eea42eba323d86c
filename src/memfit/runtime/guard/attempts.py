"""Attempts at a step that all ranks agree on: it is done on every rank, or has failed on all.

Ranks speak twice per attempt: before the update, when every rank has its gradients, and after it. A
rank that failed speaks at once; the others hear it when they come to the same point, or when
training's group, which it has left, lets them go.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from memfit.errors import MemfitError, OtherRankError
from memfit.observe.out_of_memory import has_lost_context, is_out_of_memory
from memfit.runtime.guard.ranks import Ranks, has_lost_peer
from memfit.runtime.planned_steps import DATA_TRANSFER, DoneStep, PlannedSteps
from memfit.trace.events import Phase

_PLACES: Sequence[str] = (DATA_TRANSFER, *(phase.value for phase in Phase))


class _Status(IntEnum):
    """How an attempt stands on one rank."""

    FINE = 0
    OUT_OF_MEMORY = 1
    LOST_PEER = 2
    ERROR = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """An attempt that ran out of memory somewhere; the same on every rank but for the cause."""

    place: str
    cause: str
    """The first line of the error."""
    rank: int
    """The first that ran out."""
    is_cut: bool
    """Whether what lies in the file alone may have been changed on some rank."""


@dataclass(frozen=True, slots=True)
class _Said:
    status: _Status
    cause: str = ""


class _NotAllFineError(Exception):
    """Leave a step before its update, since a rank has failed."""


class Attempts:
    """Run attempts at steps.

    Args:
        steps: what runs them.
        ranks: who has to agree.
        average: averages the gradients over the ranks, once all have theirs; None where the job
            does so itself.
    """

    def __init__(
        self, steps: PlannedSteps, ranks: Ranks, average: Callable[[], None] | None = None
    ) -> None:
        self._steps = steps
        self._ranks = ranks
        self._average = average
        self.is_updating = False
        """Whether the latest attempt has come to its update."""
        self.is_averaging = False
        """Whether it was cut while gradients were averaged over the ranks."""
        self._said: list[tuple[int, ...]] = []

    def run(self, batch: Any, has_touched: Callable[[], bool]) -> DoneStep | FailedAttempt:
        """Attempt a step; where it fails, gradients are dropped and nothing else is undone.

        Args:
            batch: of the step.
            has_touched: says whether what lies in the file alone may have been changed.

        Raises:
            OtherRankError: if another rank has failed otherwise, or died.
        """
        self.is_updating, self.is_averaging, self._said = False, False, []
        self._ranks.begin_step()
        done, own = None, _Said(_Status.FINE)
        try:
            done = self._steps.attempt(batch, lambda: self._agree(has_touched))
        except _NotAllFineError:
            pass
        except Exception as error:
            own = self._classified(error)
            if own.status is _Status.ERROR:
                self._tell_of_error()
                raise
        if done is None:
            self._steps.drop_gradients()
        if not self._said or self.is_updating:
            self._speak(own, has_touched)
        failure = self._verdict(own)
        if failure is None:
            assert done is not None, "an attempt that did not fail gives a result"
            return done
        self._rejoin()
        return failure

    def _agree(self, has_touched: Callable[[], bool]) -> None:
        """Go on to the update if every rank has its gradients."""
        if self._ranks.num_ranks == 1:  # nobody to ask, in every step
            self._said, self.is_updating = [(_Status.FINE, 0, 0, 0)], True
            return
        self._speak(_Said(_Status.FINE), has_touched)
        if any(each[0] != _Status.FINE for each in self._said):
            raise _NotAllFineError
        self.is_updating = True
        self._ranks.note_training()
        if self._average is not None:
            if len({each[3] for each in self._said}) > 1:
                msg = (
                    "The ranks have gradients for different parameters, so they cannot be "
                    "averaged. Let every rank's loss reach the same parameters, for example by "
                    "adding 0 * sum of the unused ones."
                )
                raise MemfitError(msg)
            self.is_averaging = True
            self._average()
            self.is_averaging = False

    def _speak(self, own: _Said, has_touched: Callable[[], bool]) -> None:
        """Tell the other ranks how the attempt stands here, and hear how it stands there."""
        has_failed = own.status is not _Status.FINE
        meets = self.is_averaging or self._ranks.meets_in_update
        if has_failed and (meets or not self.is_updating):
            self._ranks.leave_training(for_sure=meets)
        updates = self.is_updating or self._steps.session.updates_in_backward
        self._said = self._ranks.exchange(
            own.status,
            int(has_failed and (updates or has_touched())),
            _PLACES.index(self._steps.place),
            self._presence() if self._average is not None and not has_failed else 0,
        )

    def _rejoin(self) -> None:
        """Make training's group anew if any rank has left it."""
        said = self._ranks.exchange(int(self._ranks.has_left))
        if any(each[0] for each in said):
            self._ranks.join_training()

    def _tell_of_error(self) -> None:
        """Let the other ranks stop as well."""
        if not self._said or self.is_updating:
            self._speak(_Said(_Status.ERROR), lambda: False)

    def _verdict(self, own: _Said) -> FailedAttempt | None:
        """Return how the attempt stands over all ranks.

        Raises:
            OtherRankError: if a rank has failed otherwise.
        """
        for rank, each in enumerate(self._said):
            if each[0] == _Status.ERROR:
                msg = f"rank {rank} raised an error"
                raise OtherRankError(msg)
        failed = [r for r, each in enumerate(self._said) if each[0] == _Status.OUT_OF_MEMORY]
        if not failed:
            if any(each[0] == _Status.LOST_PEER for each in self._said):
                raise OtherRankError(own.cause or "another rank has lost the connection")
            return None
        first = failed[0]
        is_own = own.status is _Status.OUT_OF_MEMORY
        return FailedAttempt(
            place=_PLACES[self._said[first][2]],
            cause=own.cause if is_own else f"rank {first} ran out of memory",
            rank=first,
            is_cut=any(each[1] for each in self._said),
        )

    def _classified(self, error: Exception) -> _Said:
        cause = str(error).strip().partition("\n")[0] or type(error).__name__
        if isinstance(error, OtherRankError) or has_lost_context(error):
            return _Said(_Status.ERROR, cause)
        if is_out_of_memory(error):
            return _Said(_Status.OUT_OF_MEMORY, cause)
        if self._ranks.num_ranks > 1 and has_lost_peer(error):
            return _Said(_Status.LOST_PEER, cause)
        return _Said(_Status.ERROR, cause)

    def _presence(self) -> int:
        """Sum up which parameters have gradients."""
        parameters = self._steps.session.model.parameters()
        return zlib.crc32(bytes(parameter.grad is not None for parameter in parameters))
