"""What keeps growing during a fit is told to Lightning's loggers."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tests.zoo.lightning_modules import Classifier, fitted

from memfit.integrations.lightning import MemfitCallback
from memfit.integrations.lightning import callback as callback_module
from memfit.journal.records import LeakEvent
from memfit.strategies.plan import Plan

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Keeping(Classifier):
    """One that keeps the graph of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.kept.append(loss)
        return loss


def marks_of(logger: CSVLogger) -> list[str]:
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return [row["step"] for row in csv.DictReader(file) if row.get("memory/event_leak")]


def test_a_leak_is_an_event_and_a_mark_in_every_logger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However busy the machine is, this short training is looked at often enough.
    monkeypatch.setattr(callback_module, "LEAKS_FRACTION", 1.0)
    loggers = [CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="board")]
    callback = MemfitCallback(plan=Plan(), find_leaks=True, rehearse=False)
    fitted(Keeping, callback, logger=loggers, max_epochs=30)

    leaks = [each for each in callback.events if isinstance(each, LeakEvent)]
    assert len(leaks) == 1
    assert "kept" in leaks[0].holder
    marks = [int(step) for step in marks_of(loggers[0])]
    # What is found when training ends is marked behind its last step.
    assert marks in ([leaks[0].step - 1], [leaks[0].step])
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = accumulators.EventAccumulator(loggers[1].log_dir)
    loggers[1].experiment.flush()
    board.Reload()
    assert [each.step for each in board.Scalars("memory/event_leak")] == marks


def test_without_a_leak_there_is_no_mark(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    callback = MemfitCallback(plan=Plan(), find_leaks=True, rehearse=False)
    fitted(Classifier, callback, logger=logger, max_epochs=12)

    assert not callback.events
    assert not marks_of(logger)
