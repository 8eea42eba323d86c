"""Trained DreaMS weights as files: sizes, backbone, head, objective; tensors and plain values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from memfit.errors import DataError
from memfit_workloads.checkpoint_files import read_checkpoint, save_checkpoint

from .backbone import DreamsBackbone
from .sizes import DreamsSizes

FINAL = "final_model.pt"
_NEEDED = ("sizes", "backbone", "head", "objective")


def save_model(path: Path, module: Any, objective: str, head_depth: int) -> None:
    """Write the trained weights whole, or leave what was there."""
    state = module.state_dict()
    head = {name: value for name, value in state.items() if not name.startswith("backbone.")}
    save_checkpoint(
        path,
        {
            "sizes": module.sizes.to_json(),
            "backbone": module.backbone.state_dict(),
            "head": head,
            "objective": objective,
            "head_depth": head_depth,
        },
    )


def read_model(path: Path) -> tuple[DreamsSizes, dict[str, Any]]:
    """Read what `save_model` wrote.

    Returns:
        The sizes, and the whole content.

    Raises:
        DataError: if it cannot be read, or is no model of DreaMS.
    """
    content = read_checkpoint(path, "DreaMS", _NEEDED)
    try:
        sizes = DreamsSizes.from_json(content["sizes"])
    except TypeError as error:
        raise DataError(str(path), f"its sizes are not those of DreaMS ({error}).") from None
    return sizes, content


def load_backbone(backbone: DreamsBackbone, path: Path) -> None:
    """Load pre-trained weights into a backbone of the same sizes.

    Raises:
        DataError: if they do not fit.
    """
    _, content = read_model(path)
    try:
        backbone.load_state_dict(content["backbone"])
    except RuntimeError as error:
        cause = str(error).partition("\n")[2].strip() or str(error)
        raise DataError(str(path), f"its weights do not fit the model: {cause}") from None


def pre_trained_sizes(path: Path, asked: DreamsSizes) -> DreamsSizes:
    """Return the sizes of a pre-trained backbone, with what may differ as asked for.

    Raises:
        DataError: if the file cannot be read.
    """
    sizes, _ = read_model(path)
    return replace(
        sizes, dropout=asked.dropout, attention=asked.attention, bias_form=asked.bias_form
    )
