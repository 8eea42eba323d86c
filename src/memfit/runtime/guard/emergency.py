"""Saves what can be saved once a card's context is lost: the file that steps go back to."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from memfit.errors import MemfitError
from memfit.files import fill_atomically
from memfit.runtime.guard.step_log import StepLog
from memfit.session.session import Session


def save_emergency_checkpoint(session: Session, log: StepLog, folder: Path) -> Path | None:
    """Write the latest state that lies on the host as a checkpoint; None where there is none.

    It holds what ``Run.load_state_dict`` takes. Nothing is read from the card.
    """
    if log.obstacle is not None:
        return None
    path = folder / f"emergency-{os.getpid()}.pt"
    try:
        content = checkpoint_of(session, log)
        fill_atomically(path, lambda file: torch.save(content, file))
    except (OSError, RuntimeError):  # a full disk, or a setting that lies on the card
        return None
    return path


def exit_with_code_of(error: MemfitError) -> None:
    """Have the process end with an error's exit code if nobody catches it.

    Python would give 1, and would first take down what lies on the lost card, which may hang.
    """
    show = sys.excepthook

    def show_and_exit(
        kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        show(kind, value, traceback)
        if value is error:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(error.exit_code)

    sys.excepthook = show_and_exit


def checkpoint_of(session: Session, log: StepLog) -> dict[str, Any]:
    """Turn the file that steps go back to into a checkpoint."""
    saved = log.content()
    values = {**saved["parameters"], **saved["buffers"]}
    named = [*_named(session.model.named_parameters), *_named(session.model.named_buffers)]
    names = {id(tensor): name for name, tensor in named if name in values}
    entries = session.model.state_dict(keep_vars=True)
    groups = session.optimizer.state_dict()["param_groups"]
    pairs = zip(groups, saved["options"], strict=True)
    groups = [{**group, **options} for group, options in pairs]
    return {
        "model": {
            key: values[names[id(entry)]] if id(entry) in names else entry
            for key, entry in entries.items()
        },
        "optimizer": {"state": saved["optimizer"], "param_groups": groups},
        "num_steps": log.num_steps_before,
        **saved["stateful"],
    }


def _named(iterate: Any) -> list[tuple[str, torch.Tensor]]:
    """List tensors under all their names; a tied one has several."""
    return list(iterate(remove_duplicate=False))
