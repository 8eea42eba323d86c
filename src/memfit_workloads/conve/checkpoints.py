"""Models from their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memfit.errors import DataError, UsageError
from memfit_workloads.epochs import load_checkpoint

from .model import ConvE
from .sizes import ConvESizes


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
    checkpoint = load_checkpoint(path, "ConvE")
    model = ConvE(sizes_of(checkpoint, path))
    try:
        model.load_state_dict(checkpoint["model_state_dict"])
    except RuntimeError as error:
        reason = f"its weights do not fit its model_config ({str(error).splitlines()[0]})."
        raise DataError(str(path), reason) from None
    return model.eval()
