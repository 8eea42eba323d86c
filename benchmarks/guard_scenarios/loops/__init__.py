"""The loops, by what they keep from step to step."""

from guard_scenarios.loops import (
    batches,
    draws,
    held_out,
    layers,
    optimizers,
    plans,
    python_state,
    unrestorable,
    weights,
)

__all__ = [
    "batches",
    "draws",
    "held_out",
    "layers",
    "optimizers",
    "plans",
    "python_state",
    "unrestorable",
    "weights",
]
