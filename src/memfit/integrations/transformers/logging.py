"""Tells the terminal what a plan does and what happened, and the Trainer's logs of memory."""

from __future__ import annotations

import logging
from typing import Any

from memfit.journal.records import Ending, Event, OutOfMemoryEvent, RunFacts, StepRecord
from memfit.journal.sentences import event_sentence
from memfit.listeners.scalars import scalars

_LOG = logging.getLogger("memfit")


class TrainerListener:
    """Say what happens, and hand what steps take to the trainer's callbacks.

    Args:
        trainer: that logs.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._num_out_of_memory = 0
        self.values: dict[str, float] = {}
        """What the latest step took, for the trainer's next log."""

    def begin(self, facts: RunFacts) -> None:
        """Say what is run."""
        strategies = ", ".join(facts.strategies) or "as it is"
        _LOG.info("memfit runs the training under its plan: %s", strategies)

    def step(self, record: StepRecord) -> None:
        """Keep the numbers of a step."""
        self.values = scalars(record, self._num_out_of_memory)

    def event(self, event: Event) -> None:
        """Say what happened."""
        self._num_out_of_memory += isinstance(event, OutOfMemoryEvent)
        _LOG.warning("memfit: %s", event_sentence(event))

    def end(self, ending: Ending | None) -> None:
        """Do nothing: the Trainer closes its loggers."""
