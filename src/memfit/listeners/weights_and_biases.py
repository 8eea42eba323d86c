"""Shows a run in Weights & Biases."""

from __future__ import annotations

from typing import Any

from memfit.errors import MissingExtraError
from memfit.journal.records import Ending, Event, OutOfMemoryEvent, RunFacts, StepRecord
from memfit.journal.sentences import event_sentence

from .scalars import ENDING_TAG, EVENTS_TAG, PREFIX, STEP_TAG, scalars


class WandbListener:
    """Log every step below ``memory/`` over ``memory/step``, and every event as text.

    In a run of yours the values wait for your own next ``run.log``, so that your step numbers stay
    yours. Of the steps in between, the highest of each value is kept, and all events.

    Args:
        run: a run that you have begun, which you finish; None begins one, which ends with training.

    Raises:
        MissingExtraError: if wandb is not installed.
    """

    def __init__(self, run: Any = None) -> None:
        self._is_own = run is None
        self._run = _begun() if run is None else run
        self._run.define_metric(f"{PREFIX}*", step_metric=STEP_TAG)
        self._num_out_of_memory = 0
        self._pending: dict[str, Any] = {}
        self._pending_at: Any = None

    def begin(self, facts: RunFacts) -> None:
        """Note what is run among the run's settings."""
        self._run.config.update(
            {
                "memfit": {
                    "title": facts.title,
                    "device": facts.device,
                    "budget_bytes": facts.budget_bytes,
                    "strategies": list(facts.strategies),
                }
            },
            allow_val_change=True,
        )

    def step(self, record: StepRecord) -> None:
        """Log the numbers of a step."""
        self._log({STEP_TAG: record.step, **scalars(record, self._num_out_of_memory)})

    def event(self, event: Event) -> None:
        """Log an event as text."""
        self._num_out_of_memory += isinstance(event, OutOfMemoryEvent)
        self._log({STEP_TAG: event.step, EVENTS_TAG: event_sentence(event)})

    def end(self, ending: Ending | None) -> None:
        """Put how the run ended into its summary, and finish a run that is the listener's own."""
        if ending is not None:
            self._run.summary[ENDING_TAG] = f"{ending.reason}: {ending.sentence}"
        if self._is_own:
            self._run.finish(exit_code=0 if ending is None else ending.exit_code)

    def _log(self, values: dict[str, Any]) -> None:
        if self._is_own:
            self._run.log(values)
            return
        if self._run.step != self._pending_at:  # the caller has logged, and what waited with it
            self._pending, self._pending_at = {}, self._run.step
        for tag, value in values.items():
            self._pending[tag] = _joined(self._pending.get(tag), value)
        # Logged without a commit, values do not advance the step counter of the caller's run.
        self._run.log(dict(self._pending), commit=False)


def _joined(earlier: Any, value: Any) -> Any:
    """Return the higher of two numbers, or both of two texts."""
    if earlier is None:
        return value
    return f"{earlier}\n{value}" if isinstance(value, str) else max(earlier, value)


def _begun() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise MissingExtraError("WandbListener", "wandb", "wandb") from error
    return wandb.init()
