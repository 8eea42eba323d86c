"""Has what a loss logs while pieces are run logged once per batch, as means over its pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from memfit.integrations.transformers.batches import INPUTS, rows_of

_IGNORED = -100
_TOTAL, _TOTAL_NAME = "_total_train_tokens", "num_tokens"
"""What TRL's trainers count, and the metric that shows it."""


@dataclass(slots=True)
class _Piece:
    """What one piece has logged."""

    weight: float
    calls: list[Mapping[str, Any]] = field(default_factory=list)
    metrics: dict[str, list[Any]] = field(default_factory=dict)
    num_tokens: Any = 0


class Logged:
    """Collect calls of ``trainer.log`` inside losses, and what TRL's trainers note of every step.

    A loss leaves none of it behind: it is logged once its batch is done.

    Args:
        trainer: that logs.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._pieces: list[_Piece] = []
        self._counts = False

    def begin(self) -> None:
        """Begin with a batch of the training itself."""
        self._pieces, self._counts = [], True

    def end(self) -> None:
        """End with the batch: what comes is not of the training."""
        self._counts = False

    @contextmanager
    def piece(self, batch: Any) -> Iterator[None]:
        """Keep what is logged inside; what a recording logs is dropped."""
        found = _Piece(self._weight(batch) if self._counts else 1.0)
        own = vars(self._trainer)
        before, total = own.get("log"), own.get(_TOTAL)
        metrics = self._metrics()
        lists = dict(metrics)
        lengths = {name: len(values) for name, values in lists.items()}

        def keep(logs: Mapping[str, Any], *_: Any, **__: Any) -> None:
            found.calls.append(dict(logs))

        self._trainer.log = keep
        try:
            yield
        finally:
            if before is None:
                del self._trainer.log
            else:
                self._trainer.log = before
            if total is not None:
                found.num_tokens = own[_TOTAL] - total
                own[_TOTAL] = total
            found.metrics = _taken_out(metrics, lists, lengths)
        if self._counts:
            self._pieces.append(found)

    def flush(self) -> None:
        """Log what the pieces of a batch have, once."""
        pieces, self._pieces = self._pieces, []
        weights = [piece.weight for piece in pieces]
        own, metrics = vars(self._trainer), self._metrics()
        if _TOTAL in own:
            own[_TOTAL] += sum(piece.num_tokens for piece in pieces)
        for name in pieces[0].metrics:
            if name == _TOTAL_NAME:
                metrics[name] = [own.get(_TOTAL)]
                continue
            for values in zip(*(piece.metrics.get(name, ()) for piece in pieces), strict=False):
                metrics.setdefault(name, []).append(_mean(values, weights))
        for calls in zip(*(piece.calls for piece in pieces), strict=False):
            names = calls[0]
            self._trainer.log(
                {name: _mean([each.get(name) for each in calls], weights) for name in names}
            )

    def _weight(self, batch: Any) -> float:
        """Return what a piece counts: its labels where TRL means over tokens, else its samples."""
        labels = batch[INPUTS].get("labels")
        if not hasattr(self._trainer, "_metrics") or labels is None or labels.dim() < 2:
            return float(rows_of(batch))
        shifts = getattr(self._trainer, "_loss_shifts_labels", False)
        return float((labels[..., 1:] if shifts else labels).ne(_IGNORED).sum())

    def _metrics(self) -> dict[str, list[Any]]:
        """Return the lists that TRL's trainers append to in every step."""
        metrics = getattr(self._trainer, "_metrics", None)
        found = metrics.get("train") if isinstance(metrics, Mapping) else None
        return found if isinstance(found, dict) else {}


def _taken_out(
    metrics: dict[str, list[Any]], lists: Mapping[str, list[Any]], lengths: Mapping[str, int]
) -> dict[str, list[Any]]:
    """Take what was added to lists out of them again, and give it."""
    found: dict[str, list[Any]] = {}
    for name in [*metrics]:
        values = metrics[name]
        before = lists.get(name)
        if values is not before:  # another list has taken its place
            found[name] = [*values]
            if before is None:
                del metrics[name]
            else:
                metrics[name] = before
        elif len(values) > lengths[name]:
            found[name] = values[lengths[name] :]
            del values[lengths[name] :]
    return found


def _mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the mean of numbers; of anything else the last."""
    if len(values) == 1 or not all(isinstance(value, (int, float)) for value in values):
        return values[-1]
    whole = sum(weights)
    if not whole:
        return values[-1]
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / whole
