"""What the code of a session's job can reach: where the look at it begins, and what is left out."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from memfit.job import Job
from memfit.live_state import LiveState
from memfit.live_state.tensor_watch import MOST_BYTES
from memfit.session.session import Session


def live_state_of(
    session: Session,
    *,
    copies_parameters: bool = False,
    gradients: bool = False,
    most_bytes: int = MOST_BYTES,
) -> LiveState:
    """Watch a session: model, optimizer, the job's functions and what is stateful besides.

    Args:
        session: of the job.
        copies_parameters: whether to keep the content of parameters and optimizer states too.
        gradients: whether ``.grad`` belongs to the state.
        most_bytes: how much content of tensors is copied at most.
    """
    left_out = () if copies_parameters else [*kept_by_others(session)]
    roots = roots_of(session)
    return LiveState(roots, leave_out=left_out, gradients=gradients, most_bytes=most_bytes)


def roots_of(session: Session, job: Job | None = None) -> dict[str, object]:
    """Name what a session's code is reached from; another job may stand in for its own."""
    job = job or session.job
    return {
        "model": session.model,
        "optimizer": session.optimizer,
        "loss": job.loss,
        "batch function": job.batch,
        "model function": job.model,
        "optimizer function": job.optimizer,
        "stateful": session.stateful,
    }


def kept_by_others(session: Session) -> Iterator[torch.Tensor]:
    """Yield parameters and optimizer states."""
    yield from session.model.parameters()
    for state in session.optimizer.state.values():
        if isinstance(state, dict):
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
