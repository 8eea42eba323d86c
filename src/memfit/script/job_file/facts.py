"""What the first step of a script has shown of it, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerGroup:
    """One group of an optimizer as it was made."""

    names: Sequence[str]
    """Of its parameters, as the model calls them."""
    condition: str
    """Which parameters it takes, as an expression of ``name`` and ``p``; empty for all."""
    settings: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenOptimizer:
    """The optimizer as it was made, before anything changed its settings."""

    module: str
    name: str
    groups: Sequence[OptimizerGroup]


@dataclass(slots=True, kw_only=True)
class SeenScript:
    """What a run of the script up to its first update has shown."""

    model: str
    """The name of what is trained, where the loop is."""
    modules: set[str]
    """Names of modules that hold parameters of it."""
    devices: Mapping[str, str]
    """Names that stand for a device: ``device`` objects, or their ``text``."""
    tensors_outside: Mapping[str, str]
    """Names outside the model that hold tensors, with what they are."""
    schedulers: set[str]
    lines: set[int]
    """Lines of the script that were run before the first update ended."""
    optimizer: SeenOptimizer
    num_backwards: int
    """Backwards in one update."""
    loss_factor: int
    """What the script's expression has to be multiplied by to be the mean over one update."""
    micro_batch_size: int
    padding: Mapping[str | int, float] = field(default_factory=dict)
    """What the script's batches are filled up with to one length, where they differ."""
    notes: list[str] = field(default_factory=list)
