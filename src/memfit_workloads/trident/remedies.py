"""What helps where no plan fits, and what the document names that would not."""

from __future__ import annotations

from memfit.errors import NoPlanFitsError
from memfit.units import format_bytes

from .four_bit import four_bit_figures, num_weights
from .settings import ADAMW, TridentSettings

_CHECKPOINTING = "activation-checkpointing"
_STATES_PER_WEIGHT, _EIGHT_BIT_STATES_PER_WEIGHT = 8.0, 2.03


def with_remedies(error: NoPlanFitsError, settings: TridentSettings) -> NoPlanFitsError:
    """Return the error with the remedies that are left to this run."""
    return NoPlanFitsError(
        error.budget_bytes,
        error.smallest_peak_bytes,
        error.by_category,
        error.strategies,
        [*_helpful(settings), *_helpless(settings, error)],
    )


def _helpful(settings: TridentSettings) -> list[str]:
    """List what takes bytes off activations, of what the flags have not asked for yet."""
    memory, micro = settings.memory_settings, settings.micro_batch_size
    asked = {*memory.require, *memory.allow}
    left: list[str] = []
    if micro is not None and micro > 1:
        left.append(f"--batch-size 1 with --grad-accum-steps {settings.batch_size}")
    if _CHECKPOINTING in memory.forbid:
        left.append("no --no-checkpointing")
    if _CHECKPOINTING in memory.require:
        left.append("no --checkpoint-every-layer, which excludes convolution-tiling")
    if not asked & {"bf16", "fp16"}:
        left.append("--use-bf16")
    if settings.placement.offload_folder is None:
        left.append("--offload-folder DIR")
    if settings.placement.is_qlora:
        left.append("no --qlora, which excludes convolution-tiling")
    left.append("fewer --num-frames, or smaller --height and --width")
    return [f"What would take bytes off: {'; '.join(left)}."]


def _helpless(settings: TridentSettings, error: NoPlanFitsError) -> list[str]:
    """Say of the document's last remedies what they could take off, where that is not enough."""
    sizes = settings.sizes
    each = _STATES_PER_WEIGHT if settings.optimizer == ADAMW else _EIGHT_BIT_STATES_PER_WEIGHT
    savings = {
        "--zero-stage 3": round(num_weights(sizes) * each),
        "--qlora": max(0, four_bit_figures(sizes, each).saved_bytes),
    }
    missing_bytes = error.smallest_peak_bytes - error.budget_bytes
    if sum(savings.values()) >= missing_bytes:
        return []
    said = " and ".join(f"{flag} ({format_bytes(num)})" for flag, num in savings.items())
    return [f"{said} together could not."]
