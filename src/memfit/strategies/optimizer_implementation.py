"""Choice of the optimizer's implementation: fused, foreach or loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from memfit.session.session import Session
from memfit.strategies.base import Numerics, Seam, Strategy, Undo
from memfit.strategies.facts import JobFacts
from memfit.trace.events import Category, Phase

_FLAGS = {
    "fused": {"fused": True, "foreach": False},
    "foreach": {"fused": False, "foreach": True},
    "loop": {"fused": False, "foreach": False},
}


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
    acts_on: ClassVar[Mapping[Category, float]] = {Category.TEMPORARIES: 1.0}
    acts_in: ClassVar[tuple[Phase, ...]] = (Phase.OPTIMIZER,)

    def __post_init__(self) -> None:
        if self.implementation not in _FLAGS:
            msg = f"implementation must be one of {', '.join(_FLAGS)}, not {self.implementation!r}"
            raise ValueError(msg)

    @classmethod
    def options(cls, facts: JobFacts) -> Iterator[Self]:
        """Offer fused, which is the smallest and the fastest, or else what there is."""
        *others, default = facts.optimizer_implementations or ("",)
        if default != "fused":
            for implementation in ["fused"] if "fused" in others else others:
                yield cls(implementation=implementation)

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse optimizers that do not offer the implementation."""
        if self.implementation in facts.optimizer_implementations:
            return None
        offered = ", ".join(facts.optimizer_implementations) or "no choice"
        return f"{facts.optimizer} offers {offered}, not {self.implementation}."

    def apply(self, session: Session) -> Undo:
        """Set the flags of every parameter group."""
        wanted = _FLAGS[self.implementation]
        before = []
        for group in session.optimizer.param_groups:
            known = {flag: value for flag, value in wanted.items() if flag in group}
            before.append((group, {flag: group[flag] for flag in known}))
            group.update(known)

        def undo() -> None:
            for group, flags in before:
                group.update(flags)

        return undo
