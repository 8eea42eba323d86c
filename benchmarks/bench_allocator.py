"""How many events a second the simulated caching allocator replays, on one core.

The events are those of a transformer's training steps: parameters and optimizer state, activations
of the forward pass, the backward pass that frees them last in first out while gradients come to
life, and the list-wise temporaries of the optimizer; 512 B to 512 MiB a block.

Run: python benchmarks/bench_allocator.py
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from results_file import save_result

from memfit.allocator.replay import simulate_events, smallest_capacity_bytes
from memfit.allocator.settings import AllocatorSettings
from memfit.units import KIB, MIB

_NUM_LAYERS = 48
_NUM_STEPS = 40
_NUM_RUNS = 5
_LAYER_PARAMETERS = (48 * MIB, 16 * MIB, 64 * MIB, 64 * MIB, 8 * KIB, 8 * KIB, 24 * KIB, 512)
_LAYER_ACTIVATIONS = (
    32 * MIB, 96 * MIB, 32 * MIB, 128 * KIB, 2 * MIB, 128 * MIB, 128 * MIB, 32 * MIB, 512, 9 * MIB,
)  # fmt: skip
_LOGITS_BYTES = 512 * MIB


class _Tape:
    """Events and sizes, as a recorded step has them."""

    def __init__(self) -> None:
        self.events: list[int] = []
        self.sizes: list[int] = []

    def new(self, num_bytes: int) -> int:
        self.sizes.append(num_bytes)
        self.events.append(len(self.sizes) - 1)
        return len(self.sizes) - 1

    def free(self, allocation: int) -> None:
        self.events.append(-1 - allocation)

    def short(self, num_bytes: int) -> None:
        self.free(self.new(num_bytes))


def transformer_steps(num_layers: int, num_steps: int, seed: int = 0) -> _Tape:
    """Write the events of some training steps; lengths vary by step, as ragged batches do."""
    draw = random.Random(seed)
    tape = _Tape()
    parameters = [tape.new(each) for _ in range(num_layers) for each in _LAYER_PARAMETERS]
    for each in parameters:
        tape.new(tape.sizes[each])
        tape.new(tape.sizes[each])
    for _ in range(num_steps):
        scale = draw.uniform(0.7, 1.0)
        saved = [_forward_layer(tape, scale) for _ in range(num_layers)]
        logits = tape.new(int(_LOGITS_BYTES * scale))
        tape.short(tape.sizes[logits])
        gradients = []
        for layer in reversed(saved):
            gradients += _backward_layer(tape, layer)
        tape.free(logits)
        _optimizer_step(tape, parameters, gradients)
    return tape


def _forward_layer(tape: _Tape, scale: float) -> list[int]:
    saved = []
    for num_bytes in _LAYER_ACTIVATIONS:
        tape.short(512)
        saved.append(tape.new(max(512, int(num_bytes * scale))))
        tape.short(max(512, int(num_bytes * scale) // 2))
    return saved


def _backward_layer(tape: _Tape, saved: list[int]) -> list[int]:
    gradients = []
    flowing = tape.new(tape.sizes[saved[-1]])
    for position, activation in enumerate(reversed(saved)):
        following = tape.new(tape.sizes[activation])
        if position < len(_LAYER_PARAMETERS):
            gradients.append(tape.new(_LAYER_PARAMETERS[position]))
        tape.short(4 * KIB)
        tape.free(flowing)
        tape.free(activation)
        flowing = following
    tape.free(flowing)
    return gradients


def _optimizer_step(tape: _Tape, parameters: list[int], gradients: list[int]) -> None:
    temporaries = [tape.new(tape.sizes[each]) for each in parameters]
    for each in temporaries:
        tape.free(each)
    for each in gradients:
        tape.free(each)


def _measure(name: str, tape: _Tape, settings: AllocatorSettings) -> dict[str, Any]:
    seconds = []
    for _ in range(_NUM_RUNS):
        started = time.perf_counter()
        outcome = simulate_events(tape.events, tape.sizes, settings=settings)
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds)
    return {
        "settings": name,
        "events_per_second": round(len(tape.events) / median),
        "median_seconds": round(median, 4),
        "peak_allocated_bytes": outcome.peak_allocated_bytes,
        "peak_reserved_bytes": outcome.peak_reserved_bytes,
        "fragmentation_fraction": round(outcome.fragmentation_fraction, 4),
        "num_device_allocations": outcome.num_device_allocations,
    }


def main() -> None:
    """Time the replay under some settings, and one search for the smallest capacity."""
    tape = transformer_steps(_NUM_LAYERS, _NUM_STEPS)
    rows = [
        _measure("defaults", tape, AllocatorSettings()),
        _measure("expandable_segments", tape, AllocatorSettings(expandable_segments=True)),
        _measure("max_split_size", tape, AllocatorSettings(max_split_size_bytes=128 * MIB)),
        _measure("roundup_power2_divisions", tape, AllocatorSettings(roundup_power2_divisions=4)),
    ]
    one_step = transformer_steps(_NUM_LAYERS, 2)
    started = time.perf_counter()
    capacity_bytes = smallest_capacity_bytes(one_step.events, one_step.sizes)
    save_result(
        "allocator",
        {
            "num_events": len(tape.events),
            "events_per_second": rows[0]["events_per_second"],
            "smallest_capacity_num_events": len(one_step.events),
            "smallest_capacity_bytes": capacity_bytes,
            "smallest_capacity_seconds": round(time.perf_counter() - started, 3),
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
