"""Shows a run in TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memfit.errors import MissingExtraError
from memfit.journal.folder import rank_folder
from memfit.journal.records import Ending, Event, OutOfMemoryEvent, RunFacts, StepRecord
from memfit.journal.sentences import event_sentence, plan_words

from .scalars import ENDING_TAG, EVENTS_TAG, RUN_TAG, scalars


class TensorBoardListener:
    """Write every step as scalars below ``memory/``, and every event as text.

    Args:
        log_dir: the folder that TensorBoard is pointed at; ranks other than the first write into a
            folder in it, which TensorBoard shows as a run of its own.

    Raises:
        MissingExtraError: if tensorboard is not installed.
    """

    def __init__(self, log_dir: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError("TensorBoardListener", "tensorboard", "tensorboard") from error
        self._open = SummaryWriter
        self._log_dir = Path(log_dir)
        self._opened: Any = None
        self._num_out_of_memory = 0

    def begin(self, facts: RunFacts) -> None:
        """Write what is run."""
        self._log_dir = rank_folder(self._log_dir, facts.rank)
        text = (
            f"{facts.title}: `{facts.command}` on {facts.device}, under "
            f"{plan_words(facts.strategies)}"
        )
        self._writer().add_text(RUN_TAG, text)

    def step(self, record: StepRecord) -> None:
        """Write the scalars of a step."""
        writer = self._writer()
        for tag, value in scalars(record, self._num_out_of_memory).items():
            writer.add_scalar(tag, value, global_step=record.step)

    def event(self, event: Event) -> None:
        """Write an event as text; it is on the disk at once, as the run may not live long."""
        self._num_out_of_memory += isinstance(event, OutOfMemoryEvent)
        writer = self._writer()
        writer.add_text(EVENTS_TAG, event_sentence(event), global_step=event.step)
        writer.flush()

    def end(self, ending: Ending | None) -> None:
        """Write how the run ended, and close the file."""
        writer = self._writer()
        if ending is not None:
            writer.add_text(ENDING_TAG, f"{ending.reason}: {ending.sentence}")
        writer.close()
        self._opened = None

    def _writer(self) -> Any:
        """Open the file when there is something to write."""
        if self._opened is None:
            self._opened = self._open(str(self._log_dir))
        return self._opened
