"""Activation checkpointing: blocks keep little, and run again in backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from memfit.errors import StrategyError
from memfit.forward_state import Before, ForwardState
from memfit.session.forwards import replace_forward, without_generation_caches
from memfit.session.session import Session
from memfit.strategies.base import AbstractBlockwise, Numerics, Seam, Undo
from memfit.strategies.facts import JobFacts, shared_facts
from memfit.trace.operators import draws, operator_name


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
                if _is_checkpointed(block):
                    raise StrategyError(self.name, f"{name} is named twice; name it once.")
                undos.callback(_checkpoint_block(name, block, frozenset(self.keep)))
            return undos.pop_all().close


def _is_checkpointed(block: torch.nn.Module) -> bool:
    own = vars(block).get("forward")
    return isinstance(own, partial) and own.func is _run_checkpointed


def _checkpoint_block(name: str, block: torch.nn.Module, keep: frozenset[str]) -> Undo:
    """Have a block's forward recomputed in backward.

    Raises:
        StrategyError: if it reads what cannot be read a second time.
    """
    effects = ForwardState({name: block}, ActivationCheckpointing.name)
    if effects.obstacle is not None:
        reason = (
            f"{name} would be run a second time, and {effects.obstacle} Leave the block out by "
            "naming the others, or keep that outside of it."
        )
        raise StrategyError(ActivationCheckpointing.name, reason)
    return replace_forward(block, partial(_run_checkpointed, block.forward, effects, keep))


def _run_checkpointed(
    forward: Callable[..., Any],
    effects: ForwardState,
    keep: frozenset[str],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a block's forward under checkpointing, when gradients are wanted at all."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    before = effects.before(*args, *kwargs.values())
    run = partial(
        checkpoint,
        forward,
        *args,
        use_reentrant=False,
        preserve_rng_state=True,
        context_fn=partial(_contexts, before, keep),
        **kwargs,
    )
    return effects.run(before, run)


def _contexts(
    before: Before, keep: frozenset[str]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of forward and of recomputation.

    What there was before the forward is put back before the cache of what is kept begins to watch,
    which would take the copies for work of the block.
    """
    if not keep:
        return nullcontext(), before.shown()
    forward, recomputation = create_selective_checkpoint_contexts(_Keeping(keep))
    return _without_cached_casts(forward), _as_before(before, _without_cached_casts(recomputation))


@contextmanager
def _as_before(before: Before, inner: AbstractContextManager[Any]) -> Iterator[None]:
    with before.shown(), inner:
        yield


@contextmanager
def _without_cached_casts(inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Let autocast cast each weight anew, in forward as in recomputation.

    A weight that another block has cast before would be cast in recomputation alone, and every
    cast after it would be taken for the one before.
    """
    is_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with inner:
            yield
    finally:
        torch.set_autocast_cache_enabled(is_enabled)


class _Keeping:
    """Say of each operator that a block calls whether its result is kept."""

    def __init__(self, keep: frozenset[str]) -> None:
        self._keep = keep
        self._num_calls: Counter[tuple[bool, str]] = Counter()

    def __call__(self, context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        key = (context.is_recompute, operator_name(func))
        position = self._num_calls[key]
        self._num_calls[key] += 1
        if f"{key[1]}.{position}" in self._keep and not draws(func, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE
