"""Weighs the pieces of a step so that an engine's average over ranks is the mean of all samples.

An engine divides the sum of all ranks' gradients by the number of ranks, in each pass (stage 2 and
3) or before the update (stage 0 and 1). A mean loss is weighed by its share of the samples of all
ranks. Of a ``Total`` the count is known only after its forward: gradients are divided by what the
first pieces lead one to expect, and by the true rest before the update, where the engine divides by
its loss scale anyway (unscale_and_clip_grads, deepspeed/runtime/zero, 0.19.8), before it clips.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from memfit.errors import JobFunctionError
from memfit.job import Total, expected_signature


class PieceWeights:
    """Weigh the losses of one step.

    Args:
        num_samples: of all ranks in this step.
        num_passes: of each rank.
        device: which ranks can send from.
    """

    def __init__(self, num_samples: int, num_passes: int, device: torch.device) -> None:
        self._num_samples, self._num_passes, self._device = num_samples, num_passes, device
        self._num_ranks = dist.get_world_size()
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)
        self._expected: float | None = None
        self._is_total: bool | None = None

    def weighed(self, loss: torch.Tensor | Total, num_in_piece: int) -> torch.Tensor:
        """Return what to give to the engine's backward for one piece.

        Raises:
            JobFunctionError: if some losses are a ``Total`` and others a mean.
        """
        is_total = isinstance(loss, Total)
        if self._is_total not in {None, is_total}:
            reason = "it returned a Total for one piece of the batch and a mean for another"
            raise JobFunctionError("loss", expected_signature("loss"), reason)
        self._is_total = is_total
        if not isinstance(loss, Total):
            self._add(loss.detach() * num_in_piece, num_in_piece)
            return loss * (num_in_piece * self._num_ranks / self._num_samples)
        self._add(loss.sum.detach(), loss.count)
        if self._expected is None:
            first = torch.as_tensor(loss.count).detach().to(self._device, torch.float64, copy=True)
            dist.all_reduce(first)
            self._expected = float(first) * self._num_passes or float(self._num_samples)
        return loss.sum * (self._num_ranks / self._expected)

    def finish(self) -> tuple[torch.Tensor, float]:
        """Return the mean loss over all ranks, and what gradients are still to be divided by."""
        dist.all_reduce(self._sums)
        mean = self._sums[0] / self._sums[1]
        rest = 1.0 if self._expected is None else float(self._sums[1]) / self._expected
        return mean, rest

    def _add(self, part: torch.Tensor, count: torch.Tensor | float) -> None:
        self._sums[0] += part.to(self._sums)
        self._sums[1] += torch.as_tensor(count).detach().to(self._sums)


@contextmanager
def divided_gradients(engine: Any, divisor: float) -> Iterator[None]:
    """Have an engine divide the gradients of its next update, before they are clipped.

    Args:
        engine: of DeepSpeed.
        divisor: 1.0 leaves them alone.
    """
    if divisor == 1.0:
        yield
        return
    if not engine.zero_optimization():
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
        yield
        return
    optimizer = engine.optimizer
    optimizer.external_loss_scale = float(optimizer.loss_scale) * divisor
    optimizer.custom_loss_scaler = True
    try:
        yield
    finally:
        optimizer.custom_loss_scaler = False
        optimizer.external_loss_scale = None
