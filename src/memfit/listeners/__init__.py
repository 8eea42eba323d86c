"""Where a run's steps and events go while it goes: files, TensorBoard, W&B, or a class of yours."""

from __future__ import annotations

from .collection import Listeners as Listeners
from .journal import JournalListener as JournalListener
from .live_line import LiveLine as LiveLine
from .protocol import StepListener as StepListener
from .tensor_board import TensorBoardListener as TensorBoardListener
from .weights_and_biases import WandbListener as WandbListener

__all__ = [
    "JournalListener",
    "Listeners",
    "LiveLine",
    "StepListener",
    "TensorBoardListener",
    "WandbListener",
]
