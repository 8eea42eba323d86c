"""From which size and over how many steps growth counts as a leak; all of it is judgement."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.units import KIB, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakLimits:
    """What is too little, or too short, to be told."""

    least_bytes_per_step: float = 64 * KIB
    """A rate that is told as soon as ``least_rate_total_bytes`` have come together."""
    least_rate_total_bytes: int = 256 * KIB
    least_total_bytes: int = MIB
    """A lower rate is told from this total on, if it matters in ``horizon_steps``."""
    horizon_steps: int = 100_000
    horizon_fraction: float = 0.01
    """Of the memory, to be taken within the horizon."""
    urgent_fraction: float = 0.1
    """Growth of this share of the memory is told within the first pass over the data as well."""
    least_metric_bytes: int = KIB
    """Per pass, for tensors that a module keeps from one pass to the next."""
    least_graph_bytes: int = 64 * KIB
    graph_steps: int = 12
    """Equal steps over which an autograd graph, or a number of hooks, has to grow."""
    lone_graph_steps: int = 64
    """The same where no optimizer step is known, so that gradients may still be accumulated."""
    list_steps: int = 100
    """Equal steps over which a list has to grow where no passes over the data are known."""
    burst_steps: int = 200
    """The same for a list that grows now and then, as by each validation."""
    cache_steps: int = 400
    """The same for what may be a cache: keys in no order, or anything that a dataset holds."""
    native_steps: int = 1000
    least_native_bytes: int = 64 * MIB
    """Growth for which nothing in Python accounts is told from here on."""
