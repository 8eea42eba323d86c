"""The files of one run, under the document's names."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from memfit.files import write_atomically
from memfit_workloads.run_files import RunFiles

_LOG = ("step", "loss", "lr")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder(RunFiles):
    """Where a run's files lie."""

    outputs: ClassVar[Sequence[str]] = (
        *RunFiles.outputs,
        *("latest_checkpoint.pth", "best_model.pth", "final_model.pth", "centers.pth"),
        "whitening.pth",
        *(
            "loss_log.csv",
            "training.log",
            "result.json",
            "samples.png",
            "density.png",
            "nearest.png",
        ),
    )
    final: ClassVar[Sequence[str]] = ("final_model.pth", "result.json")
    folder_flag: ClassVar[str] = "--save"
    resume_flag: ClassVar[str] = "--resume"

    @property
    def latest_checkpoint(self) -> Path:
        """All that an exact continuation needs."""
        return self.root / "latest_checkpoint.pth"

    @property
    def best_model(self) -> Path:
        """The network's weights with the least negative log-likelihood on validation samples."""
        return self.root / "best_model.pth"

    @property
    def whitening(self) -> Path:
        """The map to the coordinates of training; there only with ``--whiten``."""
        return self.root / "whitening.pth"

    @property
    def final_model(self) -> Path:
        """The network's weights, there only if training came to its end."""
        return self.root / "final_model.pth"

    @property
    def centres(self) -> Path:
        """The centres of the whole mixture."""
        return self.root / "centers.pth"

    def write_log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write step, loss and learning rate of every step."""
        text = io.StringIO()
        writer = csv.DictWriter(text, _LOG, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        write_atomically(self.root / "loss_log.csv", text.getvalue())
