"""A device as data: memory, speeds and allocator rules, each number with its source and date."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CPU = "cpu"
CUDA = "cuda"
ROCM = "rocm"
_CACHE_RATE = "cache_bandwidth_bytes_per_second"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A number from outside: its value, where it was read, when, and how sure it is."""

    value: float
    source: str
    read_on: str
    certainty: str
    """``exact``, ``table`` or ``guess``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Where a step would run."""

    name: str
    title: str
    kind: str
    """``cpu`` or ``cuda``, as torch names its devices: ``cuda`` is that of AMD's cards too."""
    compute_capability: str | None
    facts: Mapping[str, Fact]
    """Every number by its name: ``memory_bytes``, ``memory_bandwidth_bytes_per_second``,
    ``link_bytes_per_second``, ``context_bytes``, ``launch_seconds`` and
    ``matrix_<dtype>_flops_per_second`` for dtypes the device multiplies (dense)."""
    platform: str = CUDA
    """What runs on it: ``cuda``, ``rocm`` or ``cpu``. memfit has rules for the first and last."""

    def value(self, fact: str) -> float:
        """Return the value of a fact."""
        return self.facts[fact].value

    @property
    def memory_bytes(self) -> int:
        """Return the memory of the device."""
        return int(self.value("memory_bytes"))

    def traffic_seconds(self, num_bytes: int) -> float:
        """Return how long it takes to move bytes; what fits into the cache moves faster."""
        memory_rate = self.value("memory_bandwidth_bytes_per_second")
        cache_rate, cache = self.facts.get(_CACHE_RATE), self.facts.get("cache_bytes")
        if cache is None or cache_rate is None or cache_rate.value <= memory_rate:
            return num_bytes / memory_rate
        near_bytes = min(num_bytes, cache.value)
        return near_bytes / cache_rate.value + (num_bytes - near_bytes) / memory_rate

    def matrix_flops_per_second(self, dtype: str) -> float:
        """Return the dense matrix rate for a dtype (``float32``, ``bfloat16``, ...)."""
        return self.matrix_rate(dtype).value

    def matrix_rate(self, dtype: str) -> Fact:
        """Return the dense matrix rate for a dtype with its source.

        Falls back to float32 where the device has no rate of its own for the dtype.
        """
        fact = self.facts.get(f"matrix_{dtype}_flops_per_second")
        return fact or self.facts["matrix_float32_flops_per_second"]
