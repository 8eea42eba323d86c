"""Checkpoints of this workload: what they hold, and which belong to a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memfit.errors import DataError, UsageError
from memfit_workloads.checkpoint_files import FoundCheckpoint, newest_of, read_checkpoint

from .model import ConvE
from .sizes import ConvESizes

_NEEDED = ("epoch", "model_state_dict", "optimizer_state_dict", "model_config", "metrics")


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint of this workload onto the CPU.

    Raises:
        DataError: if the file is missing, cut off, or no checkpoint of this workload.
    """
    return read_checkpoint(path, "ConvE", _NEEDED)


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
    return newest_of(folder, load_checkpoint, progress_of)


def progress_of(checkpoint: dict[str, Any]) -> tuple[int, int]:
    """Return whole epochs and further steps of a checkpoint, to tell which got further."""
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
