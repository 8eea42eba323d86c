"""Computes the gradients of the mean loss over a batch, in one piece or in micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from memfit.job import Total
from memfit.session.carried_effects import CarriedEffects
from memfit.session.micro_batches import GradientSum, own_count
from memfit.session.session import PhaseListener, Session
from memfit.trace.abridgement import left_out
from memfit.trace.events import Phase


def accumulate_gradients(session: Session, batch: Any, enter_phase: PhaseListener) -> torch.Tensor:
    """Leave the gradients of the mean loss in ``.grad`` and return that loss, a detached scalar."""
    pieces = _pieces(session, batch)
    if pieces is not None:
        return _in_pieces(session, batch, pieces, enter_phase)
    weight = weight_of_rank(session, batch)
    loss = session.loss_of(batch)
    session.num_counted = loss.count if isinstance(loss, Total) else None
    mean = loss.sum / own_count(session, loss.count) if isinstance(loss, Total) else loss
    found = mean.detach()
    if weight is not None and not isinstance(loss, Total):
        mean = mean * weight.to(mean.dtype)
    if isinstance(loss, Total) and session.agreement is not None:
        # Ranks average what they give, whatever its count; the loss that is told is a rank's own.
        mean = loss.sum / session.agreement.divisor(loss.count)
    del loss
    enter_phase(Phase.BACKWARD)
    session.backward(mean)
    return found


def weight_of_rank(session: Session, batch: Any) -> torch.Tensor | None:
    """Return what this rank's mean counts for where backward averages; None for no more than it is.

    All ranks have to ask.
    """
    if session.parallel is None or session.agreement is None:
        return None
    return session.agreement.sample_weight(session.layout.num_samples(batch))


def _pieces(session: Session, batch: Any) -> Iterator[tuple[Any, int]] | None:
    """Cut a batch, as other ranks do that wait for this one; None where it stays whole."""
    layout, size = session.layout, session.micro_batch_size
    num_samples = layout.num_samples(batch)
    own = wanted = max(1, -(-num_samples // size))
    if session.agreement is not None:
        wanted = session.agreement.num_pieces(own, num_samples)
    if wanted == 1:
        return None
    return layout.split(batch, size) if wanted == own else layout.split_evenly(batch, wanted)


def _in_pieces(
    session: Session,
    batch: Any,
    pieces: Iterable[tuple[Any, int]],
    enter_phase: PhaseListener,
) -> torch.Tensor:
    total = GradientSum(session, weight_of_rank(session, batch))
    num_samples = session.layout.num_samples(batch)
    carried = session.carried_effects or CarriedEffects(session, "micro-batching")
    carried.begin_step()
    skipped = left_out(-(-num_samples // session.micro_batch_size))
    for number, ((piece, num_in_piece), is_last) in enumerate(_with_last(pieces)):
        if number in skipped:
            continue
        if session.before_piece is not None:
            session.before_piece(is_last)
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


def _with_last(pieces: Iterable[tuple[Any, int]]) -> Iterator[tuple[tuple[Any, int], bool]]:
    """Yield pieces with whether they are the last."""
    waiting: list[tuple[Any, int]] = []
    for piece in pieces:
        if waiting:
            yield waiting.pop(), False
        waiting.append(piece)
    yield from ((piece, True) for piece in waiting)
