"""Checkpoints of this workload, and mixtures from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memfit.errors import DataError, UsageError
from memfit_workloads.checkpoint_files import read_checkpoint

from .model import KernelMixture
from .sizes import MixtureSizes

_NEEDED = ("step", "model_state_dict", "optimizer_state_dict", "model_config", "seed")


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint of this workload onto the CPU.

    Raises:
        DataError: if the file is missing, cut off, or no checkpoint of this workload.
    """
    return read_checkpoint(path, "WPO-SGM", _NEEDED)


def load_mixture(folder: Path, name: str = "best_model.pth") -> KernelMixture:
    """Build the trained mixture that lies in a run's folder, ready to evaluate or to draw from.

    ``name`` is the file of the network's weights, ``final_model.pth`` for those of the last step.

    Raises:
        DataError: if a file is missing or does not fit the others.
    """
    checkpoint = load_checkpoint(folder / "latest_checkpoint.pth")
    centres = load_weights(folder / "centers.pth")
    try:
        mixture = KernelMixture(MixtureSizes.from_json(checkpoint["model_config"]), centres)
        mixture.network.load_state_dict(load_weights(folder / name))
    except (TypeError, RuntimeError, UsageError) as error:
        reason = f"its files do not belong together ({str(error).splitlines()[0]})."
        raise DataError(str(folder), reason) from None
    return mixture.eval()


def load_weights(path: Path) -> Any:
    """Read tensors that were saved by themselves or by name.

    Raises:
        DataError: if they cannot be read.
    """
    try:
        found: Tensor | dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - the reader raises whatever damage leads to
        reason = f"it cannot be read ({str(error).partition(chr(10))[0]})."
        raise DataError(str(path), reason) from None
    return found
