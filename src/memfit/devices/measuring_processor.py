"""The measurements of ``memfit calibrate --device cpu``: what this machine's processor reaches.

Read are square products, additions of tensors from one that fits into any cache to one that fits
into none, and the smallest operator, each with as many threads as torch uses.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Protocol

from memfit.units import MIB

Work = Callable[[], object]

_WIDTH = 1024
_ADDED_BYTES = tuple(2**power * MIB for power in range(9))
"""What an addition reads and writes: 1 MiB to 256 MiB."""
_STEP_BYTES = 64 * MIB
"""What a small step of training goes through before it comes back to the same tensor."""
_IN_CACHE = 0.6
"""What moves at this share of the best rate still lies in the cache."""
_NUM_ROUNDS = 3
_ROUND_SECONDS = 0.1
_MOST_REPEATS = 10_000
_DTYPES = ("float32", "float64", "bfloat16", "float16")
_SLOW_SHARE = 0.1
"""Types in which products are slower than this share of float32's are only measured once."""

PROCESSOR_STAGES = (
    ("memory_bandwidth_bytes_per_second", "additions of tensors too large for the cache"),
    ("cache_bandwidth_bytes_per_second", "additions of tensors in the cache"),
    ("cache_bytes", "the largest additions that are as fast"),
    ("link_bytes_per_second", "half of the memory bandwidth: a copy reads and writes"),
    ("matrix_<dtype>_flops_per_second", "matrix products in each dtype"),
    ("launch_seconds", "the smallest operators, one after another"),
    ("<class>_share", "what operators of each class reach of that in pieces of training steps"),
    ("<class>_call_seconds", "what their calls take whatever the size"),
)
"""What is measured, as ``--dry-run`` shows it."""


class Processor(Protocol):
    """What the measurements ask of a processor."""

    def product(self, width: int, dtype: str) -> Work:
        """Prepare a square matrix product."""

    def addition(self, num_bytes: int) -> Work:
        """Prepare an addition that reads and writes so many bytes in all."""

    def smallest_operator(self) -> Work:
        """Prepare an operator whose work takes no time."""

    def seconds(self, work: Work, num_repeats: int) -> float:
        """Time the work, done several times."""


def measure_processor(processor: Processor) -> dict[str, float]:
    """Measure a processor; takes a few seconds."""
    rates = {
        size: size / _best_seconds(processor, processor.addition(size)) for size in _ADDED_BYTES
    }
    best = max(rates.values())
    memory_rate = rates[_ADDED_BYTES[-1]]
    cached = [size for size, rate in rates.items() if rate >= _IN_CACHE * best]
    is_flat = memory_rate >= _IN_CACHE * best  # what a step has left in the caches is of no use
    return {
        "memory_bandwidth_bytes_per_second": memory_rate,
        "cache_bandwidth_bytes_per_second": best,
        "cache_bytes": 0 if is_flat else max(cached),
        "link_bytes_per_second": memory_rate / 2,
        **_matrix_rates(processor),
        "launch_seconds": _best_seconds(processor, processor.smallest_operator()),
    }


def _matrix_rates(processor: Processor) -> Mapping[str, float]:
    """Measure products in each type; few processors multiply the short types by themselves."""
    num_flops = 2 * _WIDTH**3
    found: dict[str, float] = {}
    for dtype in _DTYPES:
        work = processor.product(_WIDTH // 4, dtype)
        small = num_flops / 4**3 / _best_seconds(processor, work)
        usual = found.get("matrix_float32_flops_per_second", 0.0)
        is_slow = small < _SLOW_SHARE * usual
        rate = (
            small
            if is_slow
            else num_flops / _best_seconds(processor, processor.product(_WIDTH, dtype))
        )
        found[f"matrix_{dtype}_flops_per_second"] = rate
    return found


def _best_seconds(processor: Processor, work: Work) -> float:
    """Time one unit of work: the best of a few rounds, each long enough for the clock."""
    processor.seconds(work, 1)
    once = processor.seconds(work, 1)
    num_repeats = max(1, min(_MOST_REPEATS, int(_ROUND_SECONDS / max(once, 1e-7))))
    return min(processor.seconds(work, num_repeats) for _ in range(_NUM_ROUNDS)) / num_repeats


class TorchProcessor:
    """This machine's processor, used through torch."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch

    def product(self, width: int, dtype: str) -> Work:
        """Prepare a square matrix product into memory that is there already."""
        kind = getattr(self._torch, dtype)
        left = self._torch.randn(width, width).to(kind)
        result = self._torch.empty_like(left)
        return lambda: self._torch.mm(left, left, out=result)

    def addition(self, num_bytes: int) -> Work:
        """Prepare additions of two tensors into a third, all in memory already.

        Each takes others, as a step does: most of what a step reads was written long ago.
        """
        num_sets = max(1, _STEP_BYTES // num_bytes)
        sets = [self._torch.ones(3, num_bytes // 12).unbind() for _ in range(num_sets)]
        turns = itertools.cycle(sets)

        def add() -> None:
            first, second, third = next(turns)
            self._torch.add(first, second, out=third)

        return add

    def smallest_operator(self) -> Work:
        """Prepare an addition to one number."""
        number = self._torch.zeros(1)
        return lambda: number.add_(1)

    def seconds(self, work: Work, num_repeats: int) -> float:
        """Time the work on the clock of the host."""
        started = time.perf_counter()
        for _ in range(num_repeats):
            work()
        return time.perf_counter() - started
