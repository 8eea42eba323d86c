"""Checkpoints that are whole or absent, hold all that an exact continuation needs, and load back.

Files are written beside their place and moved there in one step. They hold tensors and plain
values only, so that reading one cannot run code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from memfit.errors import DataError, UsageError
from memfit.files import fill_atomically
from memfit.session.leaves import bytes_in

INTERRUPTED = "checkpoint_interrupted.pt"
_REMEDY = "Give another checkpoint, or --resume-from-checkpoint auto for the newest whole one."


def save_checkpoint(path: Path, content: dict[str, Any] | torch.Tensor) -> None:
    """Write a checkpoint whole, or leave what was there.

    Raises:
        FullDiskError: if the disk has no room for it.
    """
    fill_atomically(path, lambda file: torch.save(content, file), needed_bytes=bytes_in(content))


def read_checkpoint(
    path: Path,
    system: str,
    needed: Sequence[str],
    *,
    remedy: str = _REMEDY,
    is_mapped: bool = False,
) -> dict[str, Any]:
    """Read a checkpoint of a system onto the CPU, and look for its entries.

    Args:
        path: where it lies.
        system: whose it is.
        needed: the entries that it has to have.
        remedy: what to do about one that cannot be used.
        is_mapped: leave the tensors in the file until they are looked at.

    Raises:
        DataError: if the file is missing, cut off, or lacks an entry.
    """
    if not path.is_file():
        raise DataError(str(path), f"there is no such checkpoint. {remedy}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except Exception as error:  # noqa: BLE001 - the reader raises whatever damage leads to
        cause = str(error).partition("\n")[0]
        reason = f"it cannot be read as a checkpoint ({type(error).__name__}: {cause}). {remedy}"
        raise DataError(str(path), reason) from None
    missing = [key for key in needed if not isinstance(content, dict) or key not in content]
    if missing:
        reason = f"it is no checkpoint of {system}: no {', '.join(missing)}. {remedy}"
        raise DataError(str(path), reason)
    found: dict[str, Any] = content
    return found


def refuse_other_run(
    path: Path, there: Mapping[str, Any], here: Mapping[str, Any], *, flag: str
) -> None:
    """Refuse a checkpoint whose continuation would be another training run.

    Args:
        path: where it lies.
        there: what identifies the run that it is from.
        here: the same of the run that it is to continue.
        flag: what asks for the checkpoint.

    Raises:
        UsageError: with all that differs.
    """
    differing = [key for key in here if there.get(key) != here[key]]
    if differing:
        what = ", ".join(f"{key} {there.get(key)} there, {here[key]} here" for key in differing)
        msg = (
            f"{path} is from another training run: {what}. Use the flags and data of that run "
            f"(config.json lists them), or leave out {flag} to start anew."
        )
        raise UsageError(msg)


def random_state() -> dict[str, Any]:
    """Take the state of torch's random generators."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Put the state of torch's random generators back."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
