"""Adds up the losses and gradients of micro-batches with their true weights."""

from __future__ import annotations

import torch

from memfit.job import Total
from memfit.session.session import Session


class GradientSum:
    """Weight the losses of micro-batches so that their gradients add up to the batch's.

    A mean loss is weighted by its share of the samples. A ``Total`` is summed as it is, and the
    gradients are divided by the count over the whole batch at the end, so that ragged counts stay
    exact.

    Args:
        session: whose gradients they are.
        weight: what the mean of a rank counts for among all; None where ranks count the same.
    """

    def __init__(self, session: Session, weight: torch.Tensor | None = None) -> None:
        self._session = session
        self._weight = weight
        self._loss: torch.Tensor | None = None
        self._count: torch.Tensor | float | None = None

    def weighted(self, loss: torch.Tensor | Total, share: float) -> torch.Tensor:
        """Return what to backpropagate for one micro-batch."""
        if not isinstance(loss, Total):
            part = loss * share
            return part if self._weight is None else part * self._weight.to(loss.dtype)
        self._count = loss.count if self._count is None else self._count + loss.count
        return loss.sum

    def add(self, part: torch.Tensor) -> None:
        """Add a backpropagated part to the loss."""
        part = part.detach()
        self._loss = part if self._loss is None else self._loss + part

    def finish(self) -> torch.Tensor:
        """Divide the gradients by the count, where there is one; return the mean loss."""
        assert self._loss is not None, "a batch has at least one micro-batch"
        self._session.num_counted = self._count
        if self._count is None:
            return self._loss if self._weight is None else self._loss / self._weight
        agreement, count = self._session.agreement, own_count(self._session, self._count)
        divisor = count if agreement is None else agreement.divisor(self._count)
        for parameter in self._session.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
        return self._loss / count


def own_count(session: Session, count: torch.Tensor | float) -> torch.Tensor | float:
    """Return what a rank's own sum is divided by: 1 where it counts nothing, and others may."""
    if not session.is_one_of_several:
        return count
    return count + (count == 0)
