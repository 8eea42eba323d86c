"""One entry in a process of its own: ``python -m recording.child JOB.json FOLDER``.

Everything that needs no card is done first. The file ``ready`` in the folder says so; the card is
touched only once the file ``go`` is there, so that several children can get ready side by side
while one alone is on the card. The outcome is the file ``result.json``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accuracy.batches import make_batch
from accuracy.losses import loss_of
from accuracy.models import build_blank, prepare_training
from accuracy.optimizers import build_optimizer
from accuracy.packages import load_package
from accuracy.protocols import Parts, protocol_of, write_step
from accuracy.rows import Row, parse_row

from memfit.devices.measuring import TorchCard, context_and_workspaces
from memfit.files import write_atomically

from .cards import CudaCard, Processor
from .measure import Step, Watch, measure
from .processes import GO, READY, RESULT

_POLL_SECONDS = 0.01
_LIBRARIES = ("transformers", "torchvision", "timm")


def main(words: list[str]) -> None:
    """Run the job that a file describes."""
    job = json.loads(Path(words[0]).read_text(encoding="utf-8"))
    folder = Path(words[1])
    if job["row"] is None:
        result = _probed(folder)
    else:
        torch.manual_seed(0)
        row = parse_row(job["row"])
        program = Program(row)
        _wait_for_turn(folder)
        card = CudaCard() if job["device"] == "cuda" else Processor()
        snapshot = Path(job["snapshot"]) if job["snapshot"] else None
        result = measure(program.place, card, snapshot).to_json()
        result["fields"] = program.counted() | _software(row)
    write_atomically(folder / RESULT, json.dumps(result))


class Program:
    """A row's model, built beside the card, and its step."""

    def __init__(self, row: Row) -> None:
        self._row = row
        if row.model_library != "custom":
            load_package(row.model_library)
        self._model = build_blank(row)

    def place(self, device: str, watch: Watch) -> Step:
        """Put everything on the device, in the order in which ``accuracy.rebuild`` does."""
        row = self._row
        model = prepare_training(self._model.to(device), row)
        optimizer = build_optimizer(row, model, device)
        batch = make_batch(row, model, device)
        parts = Parts(
            model=model, optimizer=optimizer, batch=batch, loss=loss_of(row), device=device
        )
        return write_step(row, protocol_of(row), parts, watch)

    def counted(self) -> dict[str, int]:
        """Count the parameters."""
        sizes = [(each.numel(), each.requires_grad) for each in self._model.parameters()]
        return {
            "params_total": sum(size for size, _ in sizes),
            "params_trainable": sum(size for size, is_trained in sizes if is_trained),
        }


def _probed(folder: Path) -> Mapping[str, Any]:
    """Describe the card, and read the context as libraries are loaded one by one."""
    _wait_for_turn(folder)
    card = TorchCard(torch)
    identity = card.identity()
    return {
        "device": identity.driver_name,
        "device_total_bytes": identity.memory_bytes,
        "driver_version": identity.driver_version,
        "readings": context_and_workspaces(card),
    }


def _software(row: Row) -> dict[str, Any]:
    names = [name for name in _LIBRARIES if name == row.model_library]
    return {
        "torch_version": str(torch.__version__),
        "cuda_version": torch.version.cuda,
        "library_versions": {name: str(load_package(name).__version__) for name in names},
    }


def _wait_for_turn(folder: Path) -> None:
    """Say that all is ready, and wait; end with the parent if that ends first."""
    parent = os.getppid()
    (folder / READY).touch()
    while not (folder / GO).exists():
        if os.getppid() != parent:
            sys.exit("the recording has ended")
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1:])
