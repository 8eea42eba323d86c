"""Tells Lightning's loggers of the memory of steps, and the terminal of what happened."""

from __future__ import annotations

import logging
from typing import Any

from memfit.journal.records import Ending, Event, OutOfMemoryEvent, RunFacts, StepRecord
from memfit.journal.sentences import event_sentence
from memfit.listeners.scalars import PREFIX, scalars

_LOG = logging.getLogger("memfit")


class LoggerListener:
    """Log what steps take below ``memory/``, as often as the trainer logs, and count events.

    Args:
        trainer: whose loggers.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._num_out_of_memory = 0

    def begin(self, facts: RunFacts) -> None:
        """Say what is run."""
        if self._trainer.is_global_zero:
            strategies = ", ".join(facts.strategies) or "as it is"
            _LOG.info("memfit runs the training under its plan: %s", strategies)

    def step(self, record: StepRecord) -> None:
        """Log the numbers of a step, where the trainer logs its own."""
        if record.step % max(1, self._trainer.log_every_n_steps) == 0:
            self._log(scalars(record, self._num_out_of_memory))

    def event(self, event: Event) -> None:
        """Say what happened, and mark the step in the loggers."""
        self._num_out_of_memory += isinstance(event, OutOfMemoryEvent)
        kind = type(event).__name__.removesuffix("Event").lower()
        if self._trainer.is_global_zero:
            _LOG.warning("memfit: %s", event_sentence(event))
        self._log({f"{PREFIX}event_{kind}": 1.0})

    def end(self, ending: Ending | None) -> None:
        """Do nothing: Lightning closes its loggers."""

    def _log(self, values: dict[str, float]) -> None:
        step = self._trainer.fit_loop.epoch_loop._batches_that_stepped
        for logger in self._trainer.loggers:
            logger.log_metrics(values, step=step)
