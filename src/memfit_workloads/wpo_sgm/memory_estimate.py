"""The memory estimate that the document prints, made true, and its rules for a strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memfit.units import format_bytes

from .sizes import MixtureSizes

if TYPE_CHECKING:
    from memfit import Prediction


_SINGLE, _PARALLEL, _CHUNKED = 0.8, 0.6, 1.5
"""Shares of a GPU's memory, or of all GPUs', up to which the document takes a strategy."""
_FLOAT32 = 4


def estimate_lines(plain: Prediction, sizes: MixtureSizes, num_centres: int) -> list[str]:
    """Write the block that the document shows, from the prediction of a step without strategies."""
    parts = plain.by_category
    centres_bytes = num_centres * sizes.num_dimensions * _FLOAT32
    weights_bytes = parts.get("parameters", 0)
    # All gradients exist before the optimizer's step, though not always at the peak.
    gradients_bytes = weights_bytes
    optimizer_bytes = parts.get("optimizer state", 0)
    known_bytes = centres_bytes + weights_bytes + gradients_bytes + optimizer_bytes
    shown = {
        "Centers": centres_bytes,
        # Factors, their gradients and everything else that grows with the number of centres.
        "Precision matrices": max(0, plain.peak_allocated_bytes - known_bytes),
        "Network weights": weights_bytes,
        "Gradients": gradients_bytes,
        "Optimizer states": optimizer_bytes,
        "Total estimate": plain.peak_allocated_bytes,
    }
    written = [f"  {name}: {format_bytes(num_bytes)}" for name, num_bytes in shown.items()]
    return ["Memory estimates (one step, nothing streamed):", *written]


def memory_line(device: torch.device, peak_bytes: int | None) -> str:
    """Write the line that the document shows, of this moment; a CPU reserves nothing beyond."""
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        reserved = f"{format_bytes(torch.cuda.memory_reserved(device))} reserved"
        line = f"Memory: {format_bytes(allocated)} allocated, {reserved}"
        return line if peak_bytes is None else f"{line}; peak {format_bytes(peak_bytes)}"
    peak = "not measured" if peak_bytes is None else f"{format_bytes(peak_bytes)} allocated"
    return f"Memory: {peak} at the peak, none reserved ({device.type})"


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
