"""Evaluates the batches of a Trainer in pieces where they do not fit whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from memfit.errors import OutOfMemoryAfterAllError
from memfit.integrations.batches import num_rows, pieces_of
from memfit.integrations.transformers.batches import plain
from memfit.integrations.transformers.training_step import TrainingStep, Weighting
from memfit.journal.records import Event, OutOfMemoryEvent
from memfit.live_state.random_sources import RandomSourcesReader
from memfit.observe.out_of_memory import is_out_of_memory
from memfit.runtime.evaluation import EVALUATION, joined
from memfit.runtime.retry import free_memory
from memfit.session.session import Session
from memfit.strategies.facts import known_separation

_IGNORED = -100


class GuardedEvaluation:
    """Run ``prediction_step`` on pieces of a batch that does not fit.

    Args:
        step: of the trainer.
        session: of its training, whose samples are known to be apart or not.
        on_event: is told where a batch did not fit.
    """

    def __init__(
        self, step: TrainingStep, session: Session, on_event: Callable[[Event], None]
    ) -> None:
        self._step, self._session, self._on_event = step, session, on_event
        self._most_samples: int | None = None
        """The largest piece that did not run out of memory; None while no batch has."""

    def guarding(self, predict: Callable[..., Any]) -> Callable[..., Any]:
        """Return a trainer's ``prediction_step`` that goes on with less."""

        def guarded(model: Any, inputs: Any, loss_only: bool, ignore_keys: Any = None) -> Any:
            def evaluate(piece: Any) -> Any:
                return predict(model, piece, loss_only, ignore_keys=ignore_keys)

            return self._evaluated(evaluate, inputs)

        return guarded

    def _evaluated(self, evaluate: Callable[[Any], Any], inputs: Any) -> Any:
        device_type = self._session.device_type
        states = RandomSourcesReader().here(*self._session.model.parameters())
        while True:
            rows = num_rows(plain(inputs)) if self._most_samples else 0
            in_piece = self._most_samples or rows
            try:
                if rows <= in_piece:
                    return evaluate(inputs)
                return self._in_pieces(evaluate, plain(inputs), in_piece)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                cause = str(error).strip().partition("\n")[0]
            free_memory(device_type)
            states.put_back(device_type)
            self._halve(min(num_rows(plain(inputs)), self._most_samples or 2**63), cause)

    def _in_pieces(
        self, evaluate: Callable[[Any], Any], inputs: Mapping[str, Any], in_piece: int
    ) -> Any:
        found = [(evaluate(piece), piece) for piece in pieces_of(inputs, in_piece)]
        counts = [num_rows(piece) for _, piece in found]
        parts = [*zip(*(result for result, _ in found), strict=True)]
        losses = parts[0]
        weights = [self._weight(piece) for _, piece in found]
        whole = sum(weights) or 1
        loss = (
            None
            if losses[0] is None
            else sum(
                each * (weight / whole)
                for each, weight in zip(losses, weights, strict=True)
                if weight  # the mean of nothing is no number
            )
        )
        others = (
            None if values[0] is None else joined([*zip(values, counts, strict=True)])
            for values in parts[1:]
        )
        return (loss, *others)

    def _weight(self, piece: Mapping[str, Any]) -> float:
        """Return what a piece's loss counts: its labels where tokens are labelled."""
        labels = piece.get("labels")
        if not isinstance(labels, torch.Tensor) or labels.dim() < 2:
            return float(num_rows(piece))
        if labels.is_floating_point():
            return float(num_rows(piece))
        shifts = getattr(self._step.trainer, "_loss_shifts_labels", False)
        return float((labels[..., 1:] if shifts else labels).ne(_IGNORED).sum())

    def _halve(self, num_samples: int, cause: str) -> None:
        """Go on with pieces of half the size.

        Raises:
            OutOfMemoryAfterAllError: if that is not possible.
        """
        number = self._step.trainer.state.global_step
        before, after = (f"pieces({each})" for each in (num_samples, num_samples // 2))
        reason = self._obstacle(num_samples // 2)
        if reason:
            raise OutOfMemoryAfterAllError(number, [before], cause, reason)
        self._most_samples = num_samples // 2
        self._on_event(
            OutOfMemoryEvent(
                step=number,
                phase=EVALUATION,
                cause=cause,
                plan=(before,),
                next_plan=(after,),
                num_steps_repeated=0,
            )
        )

    def _obstacle(self, num_samples: int) -> str:
        """Say why the results of pieces may not make up that of the batch; empty if they do."""
        if num_samples < 1:
            return "a piece has one sample already."
        separation = known_separation(self._session)
        if separation is None or self._step.weighting is Weighting.LABELS:
            return ""
        found = separation.of(min(num_samples, separation.job.batch_size), given_statistics=True)
        return "" if found.is_settled else found.sentence
