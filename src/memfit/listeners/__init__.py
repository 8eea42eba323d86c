"""Where a run's steps and events go while it goes: files, TensorBoard, W&B, or a class of yours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .collection import Listeners as Listeners
from .journal import JournalListener as JournalListener
from .protocol import StepListener as StepListener
from .tensor_board import TensorBoardListener as TensorBoardListener
from .weights_and_biases import WandbListener as WandbListener

if TYPE_CHECKING:
    from .live_line import LiveLine as LiveLine

__all__ = [
    "JournalListener",
    "Listeners",
    "LiveLine",
    "StepListener",
    "TensorBoardListener",
    "WandbListener",
]


def __getattr__(name: str) -> Any:
    """Import what needs rich when it is used: rich draws from Python's ``random`` on import."""
    if name != "LiveLine":
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    from .live_line import LiveLine

    return LiveLine
