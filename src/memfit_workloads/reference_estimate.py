"""The memory formula of the NAICS guide, as it stands, as a reference to hold predictions against.

It reproduces the guide's table for a card of 23.6 GB (45, 5, 225; 19.8 GB), 40 GB (82, 3, 246;
33.9 GB) and 80 GB (128, 2, 256; 51.5 GB). For 32 GB the guide prints 26.5 GB where its own formula
gives 27.07. ``DIFFERENCES`` says what a recorded step has otherwise. GB and MB are powers of 1024
here, as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from memfit.errors import UsageError
from memfit.units import GIB, MIB

SAFETY_MARGIN = 0.85
MOST_SAMPLES = 128
STAGES: Mapping[str, tuple[int, int]] = {"01": (32, 24), "02-05": (16, 8)}
"""Positives and negatives per anchor in the stages of the curriculum."""
PRINTED_GIB: Mapping[int, float] = {24: 19.8, 32: 26.5, 40: 33.9, 80: 51.5}
"""What the guide prints for the first stage, by the size of the card."""
DIFFERENCES = (
    "it gives frozen weights gradients and AdamW states: of 105.2 M parameters 14.7 M are trained",
    "16-mixed keeps float32 weights: 4 bytes each, not 2",
    "attention scores are counted once, not per layer, and fused attention stores none",
    "it takes checkpointing for a quarter of everything, and not for one layer at a time",
    "the micro-batch stops at 128, whatever the card",
    "n_positives is no part of it: it lengthens the epoch, not the step",
)
_BASE_PARAMETERS = 22_700_000
_LINEAR_LAYERS = 50
_LAYERS = 6
_HEADS = 12
_OVERHEAD_BYTES = 1500 * MIB
_CHECKPOINTED_FRACTION = 0.25


@dataclass
class ModelConfig:
    """The model, in the guide's names and with its defaults."""

    base_model_name: str = "sentence-transformers/all-MiniLM-L6-v2"
    embedding_dim: int = 384
    num_channels: int = 4
    max_length: int = 512
    lora_r: int = 8
    num_experts: int = 4
    top_k: int = 2
    moe_hidden_dim: int = 1024
    use_fp16: bool = True

    @property
    def num_parameters(self) -> int:
        """Count the parameters as the guide does, frozen ones included."""
        width = self.embedding_dim * self.num_channels
        return (
            _BASE_PARAMETERS * self.num_channels
            + 2 * self.lora_r * self.embedding_dim * _LINEAR_LAYERS * self.num_channels
            + self.num_experts * 2 * width * self.moe_hidden_dim
            + width * self.num_experts
            + width * self.embedding_dim
        )


@dataclass
class TrainingConfig:
    """The training, in the guide's names and with its defaults."""

    batch_size: int = 4
    n_positives: int = 16
    n_negatives: int = 8
    accumulate_grad_batches: int = 16
    gradient_checkpointing: bool = True

    @property
    def num_texts(self) -> int:
        """Count the anchors, positives and negatives of a micro-batch."""
        return self.batch_size * (2 + self.n_negatives)


@dataclass(frozen=True)
class MemoryEstimate:
    """The guide's breakdown, in bytes."""

    parameter_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    activation_bytes: int
    batch_bytes: int
    overhead_bytes: int

    @property
    def total_bytes(self) -> int:
        """Add the parts up."""
        return sum(self.parts().values())

    @property
    def total_mb(self) -> float:
        """Return the sum in the guide's unit."""
        return self.total_bytes / MIB

    def parts(self) -> dict[str, int]:
        """Return the parts by the guide's names for them."""
        return {
            "Model Parameters": self.parameter_bytes,
            "Optimizer State": self.optimizer_bytes,
            "Gradients": self.gradient_bytes,
            "Activations": self.activation_bytes,
            "Batch Data": self.batch_bytes,
            "Overhead": self.overhead_bytes,
        }

    def __str__(self) -> str:
        rows = [
            f"{name:<18}{num_bytes / MIB:>10,.1f} MB" for name, num_bytes in self.parts().items()
        ]
        total = f"{'Total':<18}{self.total_mb:>10,.1f} MB ({self.total_bytes / GIB:.2f} GB)"
        return "\n".join([*rows, total])


def estimate_memory_usage(model_cfg: ModelConfig, train_cfg: TrainingConfig) -> MemoryEstimate:
    """Compute the guide's estimate of one step."""
    bytes_per_value = 2 if model_cfg.use_fp16 else 4
    parameter_bytes = model_cfg.num_parameters * bytes_per_value
    fraction = _CHECKPOINTED_FRACTION if train_cfg.gradient_checkpointing else 1.0
    # The values that the guide takes a text to leave behind in the forward pass.
    length, width = model_cfg.max_length, model_cfg.embedding_dim
    encoder = model_cfg.num_channels * (length**2 * _HEADS + _LAYERS * length * width * 4)
    experts = 2 * width * model_cfg.num_channels + 2 * model_cfg.moe_hidden_dim * model_cfg.top_k
    values = train_cfg.num_texts * (encoder + experts + 2 * width) * fraction
    return MemoryEstimate(
        parameter_bytes=parameter_bytes,
        optimizer_bytes=model_cfg.num_parameters * 8,
        gradient_bytes=parameter_bytes,
        activation_bytes=round(values * bytes_per_value),
        batch_bytes=train_cfg.num_texts * model_cfg.num_channels * model_cfg.max_length * 16,
        overhead_bytes=_OVERHEAD_BYTES,
    )


def largest_batch_size(
    available_bytes: int,
    model_cfg: ModelConfig,
    train_cfg: TrainingConfig,
    safety_margin: float = SAFETY_MARGIN,
) -> int:
    """Return the largest micro-batch whose estimate fits; at most 128, as in the guide.

    Raises:
        UsageError: if the margin is no fraction, or not even one sample fits.
    """
    if not 0 < safety_margin <= 1:
        raise UsageError(f"safety_margin is {safety_margin}; needed is a part of 1, such as 0.85.")
    for batch_size in range(MOST_SAMPLES, 0, -1):
        tried = replace(train_cfg, batch_size=batch_size)
        if estimate_memory_usage(model_cfg, tried).total_bytes <= safety_margin * available_bytes:
            return batch_size
    smallest = estimate_memory_usage(model_cfg, replace(train_cfg, batch_size=1))
    raise UsageError(
        f"Not even one anchor with {train_cfg.n_negatives} negatives fits by the guide's formula: "
        f"it takes {smallest.total_bytes / GIB:.2f} GB, and {safety_margin:.0%} of "
        f"{available_bytes / GIB:.2f} GB may be used. Take a larger card, shorter texts or fewer "
        "negatives."
    )


def suggest_configurations(
    available_memory_gb: float,
    model_cfg: ModelConfig,
    target_effective_batch: int = 256,
    safety_margin: float = SAFETY_MARGIN,
) -> list[dict[str, Any]]:
    """Suggest settings per stage as the guide does, with its floor that can miss the target.

    ``memfit config`` chooses exact factors instead.

    Raises:
        UsageError: if not even one sample fits.
    """
    available_bytes = round(available_memory_gb * GIB)
    suggestions = []
    for stage, (n_positives, n_negatives) in STAGES.items():
        train_cfg = TrainingConfig(n_positives=n_positives, n_negatives=n_negatives)
        batch_size = largest_batch_size(available_bytes, model_cfg, train_cfg, safety_margin)
        accumulation = max(1, target_effective_batch // batch_size)
        chosen = replace(train_cfg, batch_size=batch_size, accumulate_grad_batches=accumulation)
        estimate = estimate_memory_usage(model_cfg, chosen)
        suggestions.append(
            {
                "stage": stage,
                "batch_size": batch_size,
                "n_positives": n_positives,
                "n_negatives": n_negatives,
                "accumulate_grad_batches": accumulation,
                "effective_batch_size": batch_size * accumulation,
                "memory_estimate": estimate,
                "memory_utilization": f"{estimate.total_bytes / available_bytes:.1%}",
            }
        )
    return suggestions
