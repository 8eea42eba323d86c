"""Stands in for Lightning's loggers while a step is run that is no step of the training.

A step may write to its loggers itself, as in ``self.logger.experiment.add_scalar(...)``. What is
recorded, tried or undone must leave nothing there, and the pieces of a batch one line.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from memfit.errors import MemfitWarning


class _Nothing:
    """Take every attribute and every call, and do nothing."""

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> _Nothing:
        return self

    def __getitem__(self, key: Any) -> _Nothing:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        """Keep nothing."""

    def __iter__(self) -> Iterator[_Nothing]:
        return iter(())

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing."""


class _StandIn:
    """Look like a logger, and note that it was asked for.

    Args:
        logger: the real one.
        is_muted: whether nothing is written.
    """

    def __init__(self, logger: Any, *, is_muted: bool) -> None:
        self._logger, self._is_muted = logger, is_muted
        self._was_used = False

    @property  # type: ignore[misc]  # so that a step that asks for its kind is told the real one
    def __class__(self) -> Any:
        return type(self._logger)

    def __getattr__(self, name: str) -> Any:
        self._was_used = True
        if not self._is_muted:
            return getattr(self._logger, name)
        if name == "experiment":  # which may be made by being asked for
            return _Nothing()
        value = getattr(self._logger, name)
        return _Nothing() if callable(value) else value


def muted(loggers: Sequence[Any]) -> list[Any]:
    """Return loggers that look like others and write nothing."""
    return [_StandIn(each, is_muted=True) for each in loggers]


class StepLoggers:
    """Say what a forward may write to the loggers.

    Args:
        trainer: whose loggers.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._has_told = False

    @contextmanager
    def of_forward(self, *, is_training: bool, is_first: bool, is_whole: bool) -> Iterator[None]:
        """Have a forward of a whole batch write as ever, of pieces the first one, others nothing.

        Args:
            is_training: whether it is a part of the training, not recorded or tried.
            is_first: whether it is the first one of its batch.
            is_whole: whether it has all samples of its batch.
        """
        trainer = self._trainer
        if not trainer.loggers or (is_training and is_whole):
            yield
            return
        before = trainer.loggers
        made = [_StandIn(each, is_muted=not (is_training and is_first)) for each in before]
        trainer.loggers = made
        try:
            yield
        finally:
            trainer.loggers = before
        if is_training and not self._has_told and any(vars(each)["_was_used"] for each in made):
            self._has_told = True
            warnings.warn(_FIRST_PIECE, MemfitWarning, stacklevel=2)


_FIRST_PIECE = (
    "training_step writes to its logger itself (self.logger). Where the plan cuts batches, what it "
    "writes is that of the first piece of each. Use self.log, whose value is that of the batch, or "
    "forbid the strategies that cut."
)
