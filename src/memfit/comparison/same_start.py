"""Gives steps the same start again and again, on the same objects, in any precision."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from memfit.comparison.left_behind import LeftBehind, left_behind
from memfit.live_state import LiveState, Obstacle
from memfit.live_state.reading import tensors_of
from memfit.session.conversion import converted
from memfit.session.session import Session
from memfit.session.stand_ins import StandIns, optimizer_tensors


class SameStart:
    """Run steps of one session several times, each time from the state that it has now.

    Copies, converted where that is asked for, stand in for every tensor that model, optimizer and
    loss can reach; everything else is put back. So hooks, parametrizations, tied weights and
    closures are those of the job, and see no difference.

    Args:
        session: to begin with, without strategies.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        job = session.job
        used: dict[str, object] = {
            "model": session.model,
            "optimizer": session.optimizer,
            "loss": job.loss,
        }
        others: dict[str, object] = {
            "model function": job.model,
            "optimizer function": job.optimizer,
            "batch function": job.batch,
        }
        self._used = LiveState(used)
        self._tensors = tensors_of(self._used)
        everything = LiveState({**used, **others}, leave_out=self._tensors, most_bytes=sys.maxsize)
        self._begin = everything.snapshot()
        self.obstacles: tuple[Obstacle, ...] = self._used.obstacles
        """What steps can change and nothing can put back."""

    def return_to(self) -> None:
        """Put everything but the content of tensors back to the start, if it has gone elsewhere."""
        self._begin.restore()

    @contextmanager
    def begin(self, dtype: torch.dtype | None = None) -> Iterator[Session]:
        """Give a session for some steps, and put everything back after them.

        Args:
            dtype: the type of all floating-point tensors; None leaves each as it is.

        Raises:
            HeldTensorError: if a tensor cannot be replaced.
        """
        try:
            with copies_in_place(self._tensors, dtype):
                yield self._new_session()
        finally:
            self._begin.restore()

    def left_behind(self, session: Session) -> LeftBehind:
        """Read what steps have left behind, besides parameters, buffers and optimizer states."""
        model = session.model
        states = (tensor for _, tensor in optimizer_tensors(session.optimizer))
        return left_behind(self._used, (*model.parameters(), *model.buffers(), *states))

    def _new_session(self) -> Session:
        begin = self._session
        return Session(
            job=begin.job,
            device_type=begin.device_type,
            layout=begin.layout,
            model=begin.model,
            optimizer=begin.optimizer,
            gradient_pass=begin.gradient_pass,
            micro_batch_size=begin.micro_batch_size,
        )


@contextmanager
def copies_in_place(tensors: Iterable[torch.Tensor], dtype: torch.dtype | None) -> Iterator[None]:
    """Have copies stand in for tensors, converted where a type is asked for.

    Raises:
        HeldTensorError: if a tensor cannot be replaced.
    """
    stand_ins = StandIns(partial(_copied, dtype=dtype))
    try:
        stand_ins.take_places(("a tensor", tensor) for tensor in tensors)
        stand_ins.settle()
        yield
    finally:
        stand_ins.put_back()


def _copied(flat: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is None:
        return flat.clone()
    made: torch.Tensor = converted(flat, dtype)
    return flat.clone() if made is flat else made
