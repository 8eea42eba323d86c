"""Choice of the optimizer's implementation: fused, foreach or loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from memfit.session.session import Session
from memfit.strategies.base import Numerics, Seam, Strategy, Undo
from memfit.strategies.facts import JobFacts
from memfit.trace.events import Category, Phase

_FLAGS = {
    "fused": {"fused": True, "foreach": False},
    "foreach": {"fused": False, "foreach": True},
    "loop": {"fused": False, "foreach": False},
}


@dataclass(frozen=True, slots=True)
class OfferedImplementations:
    """The implementations that a job's optimizer offers, the one it uses by itself last."""

    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OptimizerImplementation(Strategy):
    """Choose how a torch optimizer steps: one fused kernel, lists of tensors, or a loop.

    ``fused`` makes no temporaries; ``foreach`` makes lists as large as the parameters; ``loop``
    makes temporaries of one parameter at a time. Set in the parameter groups, so that state and
    hyper-parameters stay as they are.

    Limits: fused rounds differently (relative 1e-6 in fp32). Optimizers from outside torch.optim
    are left alone.
    Source: https://docs.pytorch.org/docs/stable/optim.html (algorithms, foreach and fused).
    """

    implementation: str

    name: ClassVar[str] = "optimizer-implementation"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    seams: ClassVar[frozenset[Seam]] = frozenset({Seam.OPTIMIZER})
    goes_with_shards: ClassVar[bool] = True
    acts_on: ClassVar[Mapping[Category, float]] = {Category.TEMPORARIES: 1.0}
    acts_in: ClassVar[tuple[Phase, ...]] = (Phase.OPTIMIZER,)

    def __post_init__(self) -> None:
        if self.implementation not in _FLAGS:
            msg = f"implementation must be one of {', '.join(_FLAGS)}, not {self.implementation!r}"
            raise ValueError(msg)

    @classmethod
    def own_facts(cls, session: Session) -> OfferedImplementations:
        """Look which implementations the job's optimizer offers."""
        return OfferedImplementations(_implementations(session.optimizer, session.device_type))

    @classmethod
    def options(cls, facts: JobFacts) -> Iterator[Self]:
        """Offer fused, which is the smallest and the fastest, or else what there is."""
        *others, default = facts.of(OfferedImplementations).names or ("",)
        if default != "fused":
            for implementation in ["fused"] if "fused" in others else others:
                yield cls(implementation=implementation)

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse optimizers that do not offer the implementation."""
        offered = facts.of(OfferedImplementations).names
        if self.implementation in offered:
            return None
        choice = ", ".join(offered) or "no choice"
        return f"{facts.optimizer} offers {choice}, not {self.implementation}."

    def apply(self, session: Session) -> Undo:
        """Set the flags of every parameter group."""
        wanted = _FLAGS[self.implementation]
        with ExitStack() as undos:
            for group in session.optimizer.param_groups:
                known = {flag: value for flag, value in wanted.items() if flag in group}
                undos.callback(group.update, {flag: group[flag] for flag in known})
                group.update(known)
            return undos.pop_all().close


def _implementations(optimizer: torch.optim.Optimizer, device_type: str) -> tuple[str, ...]:
    """List the implementations that torch.optim offers for an optimizer, its default last."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return ()
    offered = [name for name in ("fused", "foreach") if name in optimizer.defaults]
    dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"]}
    if "fused" in offered and not all(dtype.is_floating_point for dtype in dtypes):
        offered.remove("fused")
    if not offered:
        return ()
    default = _default_implementation(optimizer.defaults, device_type)
    others = [name for name in (*offered, "loop") if name != default]
    return (*others, default)


def _default_implementation(defaults: Mapping[str, Any], device_type: str) -> str:
    """Return which implementation torch takes when none is asked for: foreach on CUDA, else a loop.

    Source: ``_default_to_fused_or_foreach`` in torch/optim/optimizer.py, torch 2.13.
    """
    if defaults.get("fused"):
        return "fused"
    foreach = defaults.get("foreach")
    if foreach is None:
        foreach = device_type == "cuda" and not defaults.get("differentiable")
    return "foreach" if foreach else "loop"
