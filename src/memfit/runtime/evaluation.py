"""Evaluates a batch, in pieces if it does not fit whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from memfit.errors import MemfitError, OutOfMemoryAfterAllError
from memfit.job import Total
from memfit.journal.records import Event, OutOfMemoryEvent
from memfit.live_state.random_sources import RandomSourcesReader
from memfit.observe.out_of_memory import is_out_of_memory
from memfit.runtime.planned_steps import PlannedSteps
from memfit.runtime.retry import free_memory
from memfit.separation.batch_conditions import broken_condition
from memfit.strategies.facts import known_separation

EVALUATION = "evaluation"
_EVERY_PASS_IS_OF_ALL = (
    "ranks that share a model run every pass together, so one of them cannot evaluate in pieces. "
    "Evaluate smaller batches on all of them."
)


class Evaluation:
    """Evaluate batches in evaluation mode and without gradients.

    A batch that does not fit whole is cut into pieces, and what they give is put together. That is
    the same only where samples do not depend on each other, which is looked into for the job's own
    loss; for a function of the caller's it is the caller's word.
    """

    def __init__(self, steps: PlannedSteps, on_event: Callable[[Event], None]) -> None:
        self._steps = steps
        self._on_event = on_event
        self._most_samples: int | None = None
        """The largest piece that did not run out of memory; None while no batch has."""

    def __call__(self, batch: Any, function: Callable[..., Any] | None, number: int) -> Any:
        """Return what ``function(model, batch)`` gives for a batch; the mean loss without one.

        Raises:
            OutOfMemoryAfterAllError: if not even one sample fits, or the loss couples samples.
            MemfitError: if what pieces give cannot be put together.
        """
        session = self._steps.session
        was_training = [module for module in session.model.modules() if module.training]
        session.model.eval()
        try:
            with torch.no_grad():
                return self._evaluated(batch, function, number)
        finally:
            for module in was_training:
                module.training = True

    def _evaluated(self, batch: Any, function: Callable[..., Any] | None, number: int) -> Any:
        session = self._steps.session
        num_samples = session.layout.num_samples(batch)
        random_states = RandomSourcesReader().here()
        while True:
            in_piece = min(num_samples, self._most_samples or num_samples)
            cause = None
            try:
                pieces = self._pieces(batch, function, in_piece)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                cause = str(error).strip().partition("\n")[0]
            if cause is None:
                return joined(pieces)
            if session.agreement is not None:
                self._steps.passes.put_back()
                plans = [_pieces_of(in_piece)]
                raise OutOfMemoryAfterAllError(number, plans, cause, _EVERY_PASS_IS_OF_ALL)
            free_memory(session.device_type)
            random_states.put_back()
            reason = None if function is not None else self._obstacle(batch, in_piece // 2)
            self._halve(in_piece, reason, number, cause)

    def _pieces(
        self, batch: Any, function: Callable[..., Any] | None, num_samples: int
    ) -> list[tuple[Any, int]]:
        """Evaluate a batch piece by piece; give results with their numbers of samples."""
        session = self._steps.session
        found = []
        for piece, count in session.layout.split(batch, num_samples):
            here = self._steps.on_device(piece)
            value = session.loss_of(here) if function is None else function(session.model, here)
            found.append((value, count))
        return found

    def _obstacle(self, batch: Any, num_samples: int) -> str | None:
        """Say why the losses of pieces may not give that of the batch; None if they do."""
        session = self._steps.session
        separation = known_separation(session)
        if num_samples < 1 or separation is None:
            return None
        here = separation.at_batch_size(session.layout.num_samples(batch))
        found = here.of(num_samples, given_statistics=True)
        if not found.is_settled:
            return found.sentence
        broken = broken_condition(session.layout, batch, found.conditions)
        return None if broken is None else broken.sentence

    def _halve(self, num_samples: int, reason: str | None, number: int, cause: str) -> None:
        """Go on with pieces of half the size.

        Raises:
            OutOfMemoryAfterAllError: if that is not possible.
        """
        if num_samples <= 1:
            reason = "a piece has one sample already."
        if reason is not None:
            raise OutOfMemoryAfterAllError(number, [_pieces_of(num_samples)], cause, reason)
        self._most_samples = num_samples // 2
        self._on_event(
            OutOfMemoryEvent(
                step=number,
                phase=EVALUATION,
                cause=cause,
                plan=(_pieces_of(num_samples),),
                next_plan=(_pieces_of(num_samples // 2),),
                num_steps_repeated=0,
            )
        )


def _pieces_of(num_samples: int) -> str:
    return f"pieces({num_samples})"


def joined(pieces: Sequence[tuple[Any, int]]) -> Any:
    """Put together what pieces gave, as if they had been one.

    Raises:
        MemfitError: if that cannot be done.
    """
    first = pieces[0][0]
    if isinstance(first, Total):
        return sum(p.sum for p, _ in pieces) / sum(p.count for p, _ in pieces)
    if len(pieces) == 1:
        return first
    leaves = [tree_flatten(value)[0] for value, _ in pieces]
    counts = [count for _, count in pieces]
    joined = [_joined_leaves(parts, counts) for parts in zip(*leaves, strict=True)]
    return tree_unflatten(joined, tree_flatten(first)[1])


def _joined_leaves(parts: Sequence[Any], counts: Sequence[int]) -> Any:
    pairs = [*zip(parts, counts, strict=True)]
    if all(isinstance(part, torch.Tensor) for part in parts):
        if all(part.dim() and len(part) == count for part, count in pairs):
            return torch.cat([*parts])
        if all(part.dim() == 0 for part in parts):
            return sum(part * (count / sum(counts)) for part, count in pairs)
    msg = (
        f"The batch did not fit whole, and a {type(parts[0]).__name__} from each of {len(parts)} "
        "pieces cannot be put together. Return tensors with one row per sample, means over the "
        "samples, or memfit.Total(sum, count)."
    )
    raise MemfitError(msg)
