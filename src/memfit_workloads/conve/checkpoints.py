"""Checkpoints that are whole or absent, hold all that an exact continuation needs, and load back.

Files are written beside their place and moved there in one step. They hold tensors and plain
values only, so that reading one cannot run code.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NamedTuple

import torch

from memfit.errors import DataError, UsageError
from memfit.files import replace_atomically

from .model import ConvE
from .sizes import ConvESizes

INTERRUPTED = "checkpoint_interrupted.pt"
_NEEDED = ("epoch", "model_state_dict", "optimizer_state_dict", "model_config", "metrics")


class FoundCheckpoint(NamedTuple):
    """A checkpoint that could be read, and the files that could not be."""

    path: Path
    content: dict[str, Any]
    unreadable: list[str]


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint whole, or leave what was there."""
    replace_atomically(path, lambda part: torch.save(content, part))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint of this workload onto the CPU.

    Raises:
        DataError: if the file is missing, cut off, or no checkpoint of this workload.
    """
    remedy = "Give another checkpoint, or --resume-from-checkpoint auto for the newest whole one."
    if not path.is_file():
        raise DataError(str(path), f"there is no such checkpoint. {remedy}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        cause = str(error).partition("\n")[0]
        reason = f"it cannot be read as a checkpoint ({type(error).__name__}: {cause}). {remedy}"
        raise DataError(str(path), reason) from None
    missing = [key for key in _NEEDED if not isinstance(content, dict) or key not in content]
    if missing:
        raise DataError(
            str(path), f"it is no checkpoint of ConvE: no {', '.join(missing)}. {remedy}"
        )
    return content


def sizes_of(checkpoint: dict[str, Any], path: Path) -> ConvESizes:
    """Read the model's sizes from a checkpoint.

    Raises:
        DataError: if sizes are missing or contradict each other.
    """
    try:
        return ConvESizes.from_json(checkpoint["model_config"])
    except (TypeError, UsageError) as error:
        reason = f"its model_config is unusable ({error}). Needed are all sizes and dropouts."
        raise DataError(str(path), reason) from None


def load_model(path: Path) -> ConvE:
    """Build the model that a checkpoint holds, ready to evaluate.

    Raises:
        DataError: if the checkpoint cannot be read or its weights do not fit its sizes.
    """
    checkpoint = load_checkpoint(path)
    model = ConvE(sizes_of(checkpoint, path))
    try:
        model.load_state_dict(checkpoint["model_state_dict"])
    except RuntimeError as error:
        reason = f"its weights do not fit its model_config ({str(error).splitlines()[0]})."
        raise DataError(str(path), reason) from None
    return model.eval()


def newest_checkpoint(folder: Path) -> FoundCheckpoint:
    """Find the checkpoint that got furthest among those that can be read.

    Raises:
        DataError: if there is none.
    """
    best: FoundCheckpoint | None = None
    unreadable: list[str] = []
    for path in sorted(folder.glob("checkpoint_*.pt")):
        try:
            content = load_checkpoint(path)
        except DataError as error:
            unreadable.append(str(error))
            continue
        if best is None or progress_of(content) > progress_of(best.content):
            best = FoundCheckpoint(path, content, unreadable)
    if best is None:
        reason = f"no checkpoint there can be read. {' '.join(unreadable)}".rstrip()
        raise DataError(str(folder), f"{reason} Leave --resume-from-checkpoint out to start anew.")
    return best


def progress_of(checkpoint: dict[str, Any]) -> tuple[int, int]:
    """Give whole epochs and further steps of a checkpoint, to tell which got further."""
    return checkpoint["epoch"], checkpoint.get("steps_done", 0)


def check_belongs(
    found: FoundCheckpoint, sizes: ConvESizes, num_queries: int, batch_size: int
) -> None:
    """Refuse a checkpoint whose continuation would be another training run.

    Raises:
        UsageError: if it belongs to another model or other data, or if it was made within an epoch
            that was cut into other batches.
    """
    content = found.content
    here = {**sizes.to_json(), "num_queries": num_queries}
    there = {**content["model_config"], "num_queries": content.get("num_queries")}
    if content.get("steps_done"):
        here["batch_size"], there["batch_size"] = batch_size, content.get("batch_size")
    differing = [key for key in here if there.get(key) != here[key]]
    if differing:
        what = ", ".join(f"{key} {there.get(key)} there, {here[key]} here" for key in differing)
        msg = (
            f"{found.path} is from another training run: {what}. Use the flags and data of that "
            "run (config.json lists them), or leave out --resume-from-checkpoint to start anew."
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
