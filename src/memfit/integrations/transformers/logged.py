"""Has what a loss logs while pieces are run logged once per batch, as means over its pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from memfit.integrations.transformers.batches import INPUTS, rows_of

_IGNORED = -100


class Logged:
    """Collect calls of ``trainer.log`` inside losses, and TRL's own metrics.

    Args:
        trainer: that logs.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._calls: list[tuple[float, list[Mapping[str, Any]]]] = []
        self._counts = False
        self._lengths: dict[str, int] = {}

    def begin(self) -> None:
        """Begin with a batch of the training itself."""
        self._calls, self._counts = [], True
        self._lengths = {name: len(values) for name, values in self._metrics().items()}

    def end(self) -> None:
        """End with the batch: what comes is not of the training."""
        self._counts = False

    @contextmanager
    def piece(self, batch: Any) -> Iterator[None]:
        """Keep what is logged inside."""
        found: list[Mapping[str, Any]] = []
        if self._counts:  # what is logged by a recording is dropped
            self._calls.append((self._weight(batch), found))
        before = vars(self._trainer).get("log")

        def keep(logs: Mapping[str, Any], *_: Any, **__: Any) -> None:
            found.append(dict(logs))

        self._trainer.log = keep
        try:
            yield
        finally:
            if before is None:
                del self._trainer.log
            else:
                self._trainer.log = before

    def flush(self) -> None:
        """Log what the pieces of a batch have, once."""
        calls, self._calls = self._calls, []
        weights = [weight for weight, _ in calls]
        self._merge_metrics(weights)
        for logs in zip(*(found for _, found in calls), strict=False):
            self._trainer.log(
                {name: _mean([e.get(name) for e in logs], weights) for name in logs[0]}
            )

    def _weight(self, batch: Any) -> float:
        """Return what a piece counts: its labels where tokens are labelled, else its samples."""
        labels = batch[INPUTS].get("labels")
        if not self._metrics() or labels is None or labels.dim() < 2:
            return float(rows_of(batch))
        shifts = getattr(self._trainer, "_loss_shifts_labels", False)
        return float((labels[..., 1:] if shifts else labels).ne(_IGNORED).sum())

    def _metrics(self) -> Mapping[str, list[Any]]:
        """Return the lists that TRL's trainers append to in every step."""
        metrics = getattr(self._trainer, "_metrics", None)
        found = metrics.get("train") if isinstance(metrics, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def _merge_metrics(self, weights: Sequence[float]) -> None:
        for name, values in self._metrics().items():
            before = self._lengths.get(name, 0)
            new = values[before:]
            if len(weights) > 1 and len(new) == len(weights):
                values[before:] = [_mean(new, weights)]


def _mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the mean of numbers; of anything else the last."""
    if len(values) == 1 or not all(isinstance(value, (int, float)) for value in values):
        return values[-1]
    whole = sum(weights)
    if not whole:
        return values[-1]
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / whole
