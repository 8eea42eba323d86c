"""Imports a user's file as it would be imported on a machine with the device in question."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import torch

from memfit.devices.spec import CUDA, Device
from memfit.errors import MemfitError
from memfit.kernels.cuda.card import Card
from memfit.prediction.placed_recorder import card_of
from memfit.virtual.cuda.runtime import runtime

Found = TypeVar("Found")


def imported_on(
    device: Device, load: Callable[[str], Found], reference: str, card: Card | None = None
) -> Found:
    """Load what a reference names, with ``torch.cuda`` answering for the device's card meanwhile.

    Files decide at their top whether they use a GPU, and in which precision. Where a file makes
    tensors on the card at its top, which is not there, it is imported as on this machine. Files
    beside it are forgotten at first, so that those that another device has seen decide again.

    Args:
        device: for which the answer is wanted.
        load: imports the file, such as ``load_job``.
        reference: ``FILE.py:NAME``.
        card: of the device, where the caller wants to know what the file asks of it.

    Raises:
        JobFileError: if the file is missing or fails while it is imported.
        JobNameError: if the file has no job of that name.
    """
    _forget_neighbours(Path(reference.partition(":")[0]))
    card = card or card_of(device)
    if device.kind != CUDA or card is None or torch.cuda.is_available():
        return load(reference)
    # It lists torch's functions by name once and for all, and must not find the card's among them.
    importlib.import_module("torch._dynamo")
    try:
        with ExitStack() as stack:
            for replacement in runtime(card):
                stack.enter_context(replacement)
            return load(reference)
    except MemfitError:
        return load(reference)


def _forget_neighbours(file: Path) -> None:
    """Drop modules that were imported from the folder of a file."""
    if not file.is_file():
        return
    folder = file.resolve().parent
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        is_plain = "." not in name and name != "__main__"  # as the folder's own files are imported
        if is_plain and origin and Path(origin).resolve().parent == folder:
            del sys.modules[name]
