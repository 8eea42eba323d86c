"""Activation checkpointing: blocks keep little, and run again in backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar, Self

from memfit.errors import StrategyError
from memfit.session.forwards import without_generation_caches
from memfit.session.session import Session
from memfit.strategies.base import AbstractBlockwise, Numerics, Seam, Undo
from memfit.strategies.facts import JobFacts, shared_facts
from memfit.strategies.recomputation import is_recomputed, recompute_block


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing(AbstractBlockwise):
    """Recompute blocks in backward instead of keeping their activations.

    ``blocks`` are names of modules; a range of numbered siblings is written ``layers.0-11``, and
    none at all means the repeated blocks of the outermost level. ``keep`` are calls of operators
    inside each block whose results are kept, so that they are not computed again: ``addmm.1`` is
    the second call of ``aten::addmm``. A plan may hold this strategy several times, for different
    blocks. Non-reentrant. Whatever else a block changes (running statistics, counters, states kept
    between steps, generators of any kind) is as it was while it runs again, so that it draws the
    same masks and computes the same, and afterwards as the first run has left it.

    Limits: one block's activations are alive at a time, so a model of one block gains nothing.
    A block that reads from an iterator or a file is refused, as that cannot be read again, and one
    that changes more than 64 MiB besides its results.
    What is kept must not be changed in place later; torch refuses that in backward. What draws
    random numbers is never kept: the draws after it would differ from those of the forward.
    Source: Chen et al. 2016, https://arxiv.org/abs/1604.06174, section 3, for whole blocks;
    Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, section 5, for keeping what is dear.
    The double update of running statistics is https://github.com/pytorch/pytorch/issues/96136.
    """

    keep: tuple[str, ...] = ()

    name: ClassVar[str] = "activation-checkpointing"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    seams: ClassVar[frozenset[Seam]] = frozenset({Seam.MODEL})
    goes_with_shards: ClassVar[bool] = True
    never_faster: ClassVar[bool] = True

    @classmethod
    def options(cls, facts: JobFacts) -> Iterator[Self]:
        """Offer each level of repeated blocks, whole; the planner finds finer choices by itself."""
        for level, names in enumerate(facts.block_levels):
            yield cls() if level == 0 else cls(blocks=names)

    def apply(self, session: Session) -> Undo:
        """Wrap the forward of each block."""
        facts = shared_facts(session)
        if reason := self.obstacle(facts):
            raise StrategyError(self.name, reason)
        with ExitStack() as undos:
            undos.enter_context(without_generation_caches(session.model))
            for name in self.block_names(facts):
                block = session.model.get_submodule(name)
                if is_recomputed(block):
                    raise StrategyError(self.name, f"{name} is named twice; name it once.")
                undos.callback(recompute_block(block, name, self.name, keep=frozenset(self.keep)))
            return undos.pop_all().close
