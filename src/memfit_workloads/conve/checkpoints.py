"""Models from their checkpoints."""

from __future__ import annotations

from pathlib import Path

from memfit.errors import DataError, UsageError
from memfit_workloads.epochs import load_checkpoint

from .model import ConvE
from .sizes import ConvESizes


def load_model(path: Path) -> ConvE:
    """Build the model that a checkpoint holds, ready to evaluate.

    Raises:
        DataError: if the checkpoint cannot be read, sizes are missing or contradict each other, or
            its weights do not fit its sizes.
    """
    checkpoint = load_checkpoint(path, "ConvE")
    try:
        model = ConvE(ConvESizes.from_json(checkpoint["model_config"]))
        model.load_state_dict(checkpoint["model_state_dict"])
    except (TypeError, UsageError) as error:
        reason = f"its model_config is unusable ({error}). Needed are all sizes and dropouts."
        raise DataError(str(path), reason) from None
    except RuntimeError as error:
        reason = f"its weights do not fit its model_config ({str(error).splitlines()[0]})."
        raise DataError(str(path), reason) from None
    return model.eval()
