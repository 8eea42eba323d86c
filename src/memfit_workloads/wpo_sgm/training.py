"""What a training run consists of, once it is prepared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from memfit_workloads.planned_memory import PlannedMemory

from .data import Samples
from .memory_plan import evaluation_chunk
from .ranks import Ranks
from .run_folder import RunFolder
from .settings import TrainingSettings
from .whitening import Whitening

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a run consists of."""

    settings: TrainingSettings
    data: Samples
    """As loaded."""
    whitening: Whitening | None
    samples: Samples
    """What is trained on: the data, or the data whitened."""
    centres: Tensor
    """Of the whole mixture."""
    planned_memory: PlannedMemory
    folder: RunFolder
    ranks: Ranks
    console: Console

    @property
    def evaluation_chunk(self) -> int:
        """Return how many kernels are held at a time outside training."""
        planned_memory = self.planned_memory
        return evaluation_chunk(
            planned_memory.plan, planned_memory.planned, self.samples.num_dimensions
        )

    def whitened(self, points: Tensor) -> Tensor:
        """Map points (N, D) of the data to the coordinates of training."""
        return points if self.whitening is None else self.whitening.apply(points)

    def unwhitened(self, points: Tensor) -> Tensor:
        """Map points (N, D) of training to those of the data."""
        return points if self.whitening is None else self.whitening.undo(points)
