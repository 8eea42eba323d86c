"""Ends an epoch of Lightning's loop behind the recorded steps, as behind its last batch.

Where data ends before its time, Lightning's loop skips the validation at the end of the epoch, and
callbacks that ask for what it measures raise. So the batch of the last recorded step is made the
last one: ``_TrainingEpochLoop.on_advance_end`` validates behind it, and the epoch ends with its
checkpoint (lightning/pytorch/loops/training_epoch_loop.py, read at Lightning 2.6).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_SEAM = "on_advance_end"
_EVERY_EPOCH = 1


def end_epochs(
    stack: ExitStack, is_enough: Callable[[], bool], stop_if_enough: Callable[[], None]
) -> None:
    """Have Lightning's loops, where they are imported, end their epochs once there is enough.

    Args:
        stack: which puts the loops back.
        is_enough: whether all steps are recorded.
        stop_if_enough: called at the end of an epoch, when its checkpoint is written.
    """

    def before_batch_ends(loop: Any) -> None:
        if is_enough():
            _make_last(loop)

    for package in _PACKAGES:
        batches = _loop(package, "training_epoch_loop", "_TrainingEpochLoop")
        epochs = _loop(package, "fit_loop", "_FitLoop")
        if batches is not None:
            ends = _around(getattr(batches, _SEAM), before_batch_ends, _nothing)
            stack.enter_context(patch.object(batches, _SEAM, ends))
        if epochs is not None:
            ends = _around(getattr(epochs, _SEAM), _nothing, lambda _: stop_if_enough())
            stack.enter_context(patch.object(epochs, _SEAM, ends))


def _loop(package: str, module: str, name: str) -> Any:
    """Return a loop's class; None where it is not imported, or has no such end."""
    found = getattr(sys.modules.get(f"{package}.loops.{module}"), name, None)
    return found if hasattr(found, _SEAM) else None


def _around(
    go_on: Callable[..., Any], before: Callable[[Any], None], after: Callable[[Any], None]
) -> Callable[..., Any]:
    @functools.wraps(go_on)
    def on_advance_end(loop: Any, *args: Any) -> Any:
        before(loop)
        out = go_on(loop, *args)
        after(loop)
        return out

    return on_advance_end


def _nothing(_loop: Any) -> None:
    """Leave a loop as it is."""


def _make_last(loop: Any) -> None:
    """Make the batch that was just trained on the last one of its epoch."""
    trainer = loop.trainer
    loop.batch_progress.is_last_batch = True
    trainer.fit_loop.max_batches = loop.batch_progress.current.ready
    # Validation comes at the end of an epoch, or after a number of batches: here both are now.
    trainer.check_val_every_n_epoch = _EVERY_EPOCH
    trainer.val_check_batch = loop.batch_progress.current.ready
