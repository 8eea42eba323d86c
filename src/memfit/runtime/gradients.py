"""Computes the gradients of the mean loss over a batch, in one piece or in micro-batches."""

from __future__ import annotations

from typing import Any

import torch

from memfit.job import Total
from memfit.session.session import PhaseListener, Session
from memfit.trace.events import Phase


def accumulate_gradients(session: Session, batch: Any, enter_phase: PhaseListener) -> torch.Tensor:
    """Leave the gradients of the mean loss in ``.grad`` and return that loss, a detached scalar.

    A mean loss is weighted by the samples of its micro-batch. A ``Total`` is summed as it is, and
    the gradients are divided by the count over the whole batch at the end, so that ragged counts
    stay exact.
    """
    if session.micro_batch_size >= session.layout.num_samples(batch):
        return _in_one_piece(session, batch, enter_phase)
    return _in_pieces(session, batch, enter_phase)


def _in_one_piece(session: Session, batch: Any, enter_phase: PhaseListener) -> torch.Tensor:
    loss = session.loss_of(batch)
    mean = loss.sum / loss.count if isinstance(loss, Total) else loss
    del loss
    enter_phase(Phase.BACKWARD)
    mean.backward()
    return mean.detach()


def _in_pieces(session: Session, batch: Any, enter_phase: PhaseListener) -> torch.Tensor:
    num_samples = session.layout.num_samples(batch)
    loss_sum: torch.Tensor | None = None
    count_sum: torch.Tensor | float | None = None
    for piece, num_in_piece in session.layout.split(batch, session.micro_batch_size):
        enter_phase(Phase.FORWARD)
        loss = session.loss_of(piece)
        if isinstance(loss, Total):
            count_sum = loss.count if count_sum is None else count_sum + loss.count
            part = loss.sum
        else:
            part = loss * (num_in_piece / num_samples)
        del loss
        enter_phase(Phase.BACKWARD)
        part.backward()
        loss_sum = part.detach() if loss_sum is None else loss_sum + part.detach()
        del part
    assert loss_sum is not None, "a batch has at least one micro-batch"
    if count_sum is None:
        return loss_sum
    _divide_gradients(session.model, count_sum)
    return loss_sum / count_sum


def _divide_gradients(model: torch.nn.Module, count: torch.Tensor | float) -> None:
    """Divide every gradient in place."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(count)
