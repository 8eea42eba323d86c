"""The memory estimate that the document prints, made true, and its rules for a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memfit.units import format_bytes

from .sizes import MixtureSizes

if TYPE_CHECKING:
    from memfit import Prediction


_SINGLE, _PARALLEL, _CHUNKED = 0.8, 0.6, 1.5
"""Shares of a GPU's memory, or of all GPUs', up to which the document takes a strategy."""
_FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """What one training step takes when nothing is streamed."""

    centres_bytes: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    kernels_bytes: int
    """Factors, their gradients and everything else that grows with the number of centres."""
    total_bytes: int
    """The predicted peak."""

    @classmethod
    def of(cls, plain: Prediction, sizes: MixtureSizes, num_centres: int) -> MemoryEstimate:
        """Read the parts from the prediction of a step without strategies."""
        parts = plain.by_category
        centres_bytes = num_centres * sizes.num_dimensions * _FLOAT32
        weights_bytes = parts.get("parameters", 0)
        optimizer_bytes = parts.get("optimizer state", 0)
        total_bytes = plain.peak_allocated_bytes
        # All gradients exist before the optimizer's step, though not always at the peak.
        gradients_bytes = weights_bytes
        known = centres_bytes + weights_bytes + optimizer_bytes + gradients_bytes
        return cls(
            centres_bytes=centres_bytes,
            weights_bytes=weights_bytes,
            gradients_bytes=gradients_bytes,
            optimizer_bytes=optimizer_bytes,
            kernels_bytes=max(0, total_bytes - known),
            total_bytes=total_bytes,
        )

    def lines(self) -> list[str]:
        """Write the block that the document shows."""
        parts = (
            ("Centers", self.centres_bytes),
            ("Precision matrices", self.kernels_bytes),
            ("Network weights", self.weights_bytes),
            ("Gradients", self.gradients_bytes),
            ("Optimizer states", self.optimizer_bytes),
            ("Total estimate", self.total_bytes),
        )
        written = [f"  {name}: {format_bytes(num_bytes)}" for name, num_bytes in parts]
        return ["Memory estimates (one step, nothing streamed):", *written]


def strategy_by_thresholds(need_bytes: int, memory_bytes: int, num_gpus: int) -> str:
    """Choose a strategy by the document's shares of memory, for comparison with the planner.

    Args:
        need_bytes: what a step takes when nothing is streamed.
        memory_bytes: of one GPU.
        num_gpus: how many there are.
    """
    if need_bytes <= _SINGLE * memory_bytes:
        return "single_gpu"
    if num_gpus > 1 and need_bytes <= _PARALLEL * num_gpus * memory_bytes:
        return "model_parallel"
    if need_bytes <= _CHUNKED * memory_bytes:
        return "chunked"
    return "gradient_accumulation"
