"""Which cases are checked: each job as it is, under each strategy alone, and under plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from memfit.strategies import CATALOGUE
from memfit.strategies.data_parallel import AbstractDataParallel

PLAIN, ALONE, BUDGET = "plain", "alone", "budget"
SHARES = (0.7, 0.45)
"""Budgets, as shares of what the plain step takes."""
_EVERYWHERE = (
    "activation-checkpointing",
    "micro-batching",
    "activation-offload",
    "optimizer-in-backward",
    "optimizer-offload",
    "optimizer-implementation",
    "tiling",
    "bf16",
    "allocator-settings",
)
_FURTHER = {
    "mlp": ("fp16", "pure-bf16", "host-modules"),
    "cnn": ("batchnorm-replay", "convolution-tiling"),
    "gpt2": ("linear-cross-entropy", "loss-chunking", "pure-bf16"),
    "llama-lora": ("frozen-offload", "linear-cross-entropy"),
    "vocabulary": ("linear-cross-entropy", "loss-chunking", "cached-gradients"),
    "weighing-attention": ("fused-attention",),
}
_FIRST = ("gpt2", "cnn", "mlp", "llama-lora", "vocabulary", "weighing-attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One job under one plan, which is still to be found."""

    job: str
    kind: str
    strategy: str | None = None
    share: float | None = None

    @property
    def name(self) -> str:
        """Name it."""
        what = self.strategy if self.share is None else f"{self.share:.0%} of plain"
        return f"{self.job}: {what or 'plain'}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"name": self.name, **asdict(self)}


def all_cases() -> tuple[Case, ...]:
    """List the cases, those that say most first: plain steps, plans, then strategies in turns."""
    plain = [Case(job=job, kind=PLAIN) for job in _FIRST]
    plans = [
        Case(job=job, kind=BUDGET, share=share) for share in reversed(SHARES) for job in _FIRST
    ]
    return (*plain, *plans, *_in_turns([list(_alone(job)) for job in _FIRST]))


def strategy_names() -> tuple[str, ...]:
    """Name the strategies that one device may have."""
    return tuple(s.name for s in CATALOGUE if not issubclass(s, AbstractDataParallel))


def _alone(job: str) -> Iterator[Case]:
    """Yield a job under each strategy that may suit it; whether it does is found out."""
    for name in (*_FURTHER.get(job, ()), *_EVERYWHERE):
        yield Case(job=job, kind=ALONE, strategy=name)


def _in_turns(lists: Sequence[Sequence[Case]]) -> Iterator[Case]:
    """Take one of each, then the next of each, so that a cut leaves all of them covered."""
    for place in range(max(map(len, lists))):
        for each in lists:
            yield from each[place : place + 1]
