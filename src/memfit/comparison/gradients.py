"""Computes the gradients of the mean loss over a batch, in one piece or in micro-batches."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from memfit.job import Total
from memfit.session.carried_effects import CarriedEffects
from memfit.session.micro_batches import GradientSum
from memfit.session.session import PhaseListener, Session
from memfit.trace.events import Phase


def accumulate_gradients(session: Session, batch: Any, enter_phase: PhaseListener) -> torch.Tensor:
    """Leave the gradients of the mean loss in ``.grad`` and return that loss, a detached scalar."""
    if session.micro_batch_size < session.layout.num_samples(batch):
        return _in_pieces(session, batch, enter_phase)
    loss = session.loss_of(batch)
    session.num_counted = loss.count if isinstance(loss, Total) else None
    mean = loss.sum / loss.count if isinstance(loss, Total) else loss
    del loss
    enter_phase(Phase.BACKWARD)
    session.backward(mean)
    return mean.detach()


def _in_pieces(session: Session, batch: Any, enter_phase: PhaseListener) -> torch.Tensor:
    total = GradientSum(session)
    num_samples = session.layout.num_samples(batch)
    carried = session.carried_effects or CarriedEffects(session, "micro-batching")
    carried.begin_step()
    for piece, num_in_piece in session.layout.split(batch, session.micro_batch_size):
        enter_phase(Phase.FORWARD)
        loss = carried.run_part(partial(session.loss_of, piece))
        part = total.weighted(loss, num_in_piece / num_samples)
        del loss
        enter_phase(Phase.BACKWARD)
        session.backward(part)
        carried.end_piece()
        total.add(part)
        del part
    carried.end_step()
    return total.finish()
