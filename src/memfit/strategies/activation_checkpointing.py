"""Activation checkpointing: blocks keep their inputs only and are run again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch.utils.checkpoint import checkpoint

from memfit.errors import StrategyError
from memfit.session.facts import JobFacts, gather_facts
from memfit.session.session import Session
from memfit.strategies.base import Numerics, Strategy, Undo

_RUNNING = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing(Strategy):
    """Recompute repeated blocks in backward instead of keeping their activations.

    ``level`` picks among nested repetitions, 0 being the outermost (the stages of a ResNet before
    the blocks inside them); ``every`` leaves blocks in between as they are (2: every second one).
    Non-reentrant; the random state is kept, so dropout draws the same masks; running statistics of
    batch normalisation are updated once, not again on recomputation.

    Limits: one block's activations are alive at a time, so a model of one block gains nothing.
    Source: Chen et al. 2016, https://arxiv.org/abs/1604.06174, section 3; the double update of
    running statistics is https://github.com/pytorch/pytorch/issues/96136.
    """

    level: int = 0
    every: int = 1

    name: ClassVar[str] = "activation-checkpointing"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def __post_init__(self) -> None:
        if self.level < 0 or self.every < 1:
            msg = f"level must be >= 0 and every >= 1, not {self.level} and {self.every}"
            raise ValueError(msg)

    @classmethod
    def options(cls, facts: JobFacts) -> Iterator[Self]:
        """Offer every level, every block or every second one."""
        for level, names in enumerate(facts.block_levels):
            for every in (2, 1) if len(names) > 3 else (1,):
                yield cls(level=level, every=every)

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse models without so many levels of repeated blocks."""
        if self.level < len(facts.block_levels):
            return None
        return (
            f"the model has {len(facts.block_levels)} levels of repeated blocks (members of a "
            f"ModuleList or Sequential that share a class), so there is no level {self.level}."
        )

    def apply(self, session: Session) -> Undo:
        """Wrap the forward of each chosen block."""
        facts = gather_facts(session)
        if reason := self.obstacle(facts):
            raise StrategyError(self.name, reason)
        names = facts.block_levels[self.level][:: self.every]
        undos = [_checkpoint_block(session.model.get_submodule(name)) for name in names]

        def undo() -> None:
            for undo_block in undos:
                undo_block()

        return undo


def _checkpoint_block(block: torch.nn.Module) -> Undo:
    """Have a block's forward recomputed in backward."""
    original = block.forward
    norms = [module for module in block.modules() if _keeps_running_statistics(module)]
    contexts = partial(_contexts, norms) if norms else None
    block.forward = partial(_run_checkpointed, original, contexts)

    def undo() -> None:
        del block.forward  # the instance attribute; the class's own forward shows again

    return undo


def _run_checkpointed(
    forward: Callable[..., Any], contexts: Callable[[], Any] | None, *args: Any, **kwargs: Any
) -> Any:
    """Run a block's forward under checkpointing, when gradients are wanted at all."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if contexts is not None:
        kwargs["context_fn"] = contexts
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)


def _keeps_running_statistics(module: torch.nn.Module) -> bool:
    return getattr(module, "running_mean", None) is not None


def _contexts(
    norms: list[torch.nn.Module],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Give the contexts of forward and of recomputation."""
    return nullcontext(), _spare_running_statistics(norms)


@contextmanager
def _spare_running_statistics(norms: list[torch.nn.Module]) -> Iterator[None]:
    """Let recomputation update copies of the running statistics, so that they count once."""
    kept = [
        {name: norm._buffers[name] for name in _RUNNING if name in norm._buffers} for norm in norms
    ]
    for norm, buffers in zip(norms, kept, strict=True):
        for name, buffer in buffers.items():
            norm._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for norm, buffers in zip(norms, kept, strict=True):
            norm._buffers.update(buffers)
